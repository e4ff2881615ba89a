"""The parity table: every model family against transformers' own class, on virtual NPUs.

    python -m benchmarks.parity                      all families; writes docs/parity.md
    python -m benchmarks.parity --family llama       some families; prints, writes nothing

Every cell comes from this run: see parity_runs.py for what each engine is asked. Run from the repository's root.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from . import forks

if TYPE_CHECKING:
    from .parity_runs import Family, Run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "parity.md"
DEADLINE = 600.0  # seconds for the engines of one run
FAMILIES = {
    "Llama": "llama",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Mistral": "mistral",
    "Gemma3": "gemma3",
    "GLM-4": "glm4",
    "Mixtral": "mixtral",
    "Qwen3-MoE": "qwen3-moe",
    "GLM-4-MoE": "glm4-moe",
    "DeepSeek V2": "deepseek-v2-moe",
    "DeepSeek V3": "deepseek-v3-moe",
    "Kimi-K2": "kimi-k2",
}
"""Title → checkpoint of tests/parity/checkpoints.py."""
COLUMNS = ("fp32", "bf16", "TP2", "DCP2", "EP2", "DPxEP", "PP2", "graph = eager", "chunked", "prefix cache")

Row = Mapping[str, Mapping[str, str]]  # column → {value, detail}

EXPLANATION = """
A checkpoint of each family is made at run time, tiny and random, and answered by the plugin on virtual NPUs and by
the family's own class in transformers on the CPU, without a cache. Five prompts of 1 to 300 tokens share each batch;
every one is continued greedily by 64 tokens.

| column | a *yes* says |
|---|---|
| fp32 | all tokens equal; log probabilities within 2e-3 (logits deviate by 8); eager, prompts whole in one step |
| bf16 | numbers: see below |
| TP2, PP2 | as fp32, on two ranks: tensor parallel, pipeline parallel; graphs, steps of at most 64 tokens |
| DCP2 | as TP2, with the KV cache of each sequence spread over two ranks (decode context parallel); four ranks where \
two would hold different key heads |
| EP2 | as TP2, with whole experts spread over the ranks |
| DPxEP | two data-parallel replicas with prompts of their own share the experts; at the end only one has work |
| graph = eager | the tokens with graphs equal those without, with fewer device calls |
| chunked | as fp32, with graphs, steps of 64 tokens: long prompts are prefilled in parts beside decoding requests |
| prefix cache | as chunked, the same prompts again: the long ones start from cached blocks |

bf16 scores fixed sequences, prompts and their fp32 answers: the largest difference of any logit from transformers in
fp32, and in brackets that of transformers in bf16. The largest may be 3 times, the mean 1.5 times that of transformers,
or the cell is *no*. Logits deviate by about 8; experts make rounding large where it changes the choice of an expert.

*n/a*: the family has nothing that the column is about. *refused*: `npufleet serve` ends with this message before it
starts anything.
"""


def supervise(columns: Sequence[str], run: Run, family: Family, log: Path) -> Row:
    """The cells of a run; those that its process did not live to answer are *no*."""
    cells: dict[str, dict[str, str]] = {}
    reason = "not answered"
    try:
        for found in forks.answers(lambda: run(family), log, DEADLINE):
            cells.update({column: vars(cell) for column, cell in found.items()})
    except forks.Broken as error:
        reason = str(error)
    return {column: cells.get(column, {"value": "no", "detail": reason}) for column in columns}


def run_family(name: str, wanted: Sequence[str]) -> Row:
    """The cells of one family. Everything is imported here once, and no NPU opened: engines live in forks."""
    from tests.parity.checkpoints import BY_NAME, VOCAB, write
    from tests.parity.reference import greedy, load, prompts

    from .parity_runs import RUNS, STEPS, Family, refusal

    began = time.monotonic()
    cells: dict[str, Mapping[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = write(BY_NAME[name], Path(folder))
        model = load(path)
        family = Family(path=path, expected=[greedy(model, prompt, STEPS) for prompt in prompts(VOCAB)])
        for columns, settings, run in RUNS:
            if not set(columns) & set(wanted):
                continue
            refused = refusal(path, settings)
            log = Path(folder) / "log"
            found = dict.fromkeys(columns, vars(refused)) if refused else supervise(columns, run, family, log)
            told = ", ".join(f"{column} {cell['value']}" for column, cell in found.items())
            print(f"  {name} [{time.monotonic() - began:4.0f} s] {told}", file=sys.stderr, flush=True)
            if any(cell["value"] == "no" for cell in found.values()):
                sys.stderr.write("".join(log.read_text().splitlines(keepends=True)[-60:]))
            cells.update(found)
    return cells


def text(column: str, cell: Mapping[str, str]) -> str:
    """A cell in the table: bf16 shows its numbers."""
    if column != "bf16" or not cell["detail"].startswith("max "):
        return cell["value"]
    largest = cell["detail"].split(",")[0].removeprefix("max ")
    return largest if cell["value"] == "yes" else f"no: {largest}"


def table(rows: Mapping[str, Row]) -> list[str]:
    """The table in Markdown."""
    columns = [column for column in COLUMNS if any(column in cells for cells in rows.values())]
    lines = [f"| family | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for family, cells in rows.items():
        lines.append(f"| {family} | {' | '.join(text(column, cells[column]) for column in columns)} |")
    return lines


def remarks(rows: Mapping[str, Row]) -> list[str]:
    """Why cells are not *yes*, each reason once."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for family, cells in rows.items():
        for column, cell in cells.items():
            if cell["value"] != "yes":
                reasons.setdefault((column, cell["value"], cell["detail"]), []).append(family)
    return [
        f"- {column}, *{value}* ({', '.join(families)}): {detail}"
        for (column, value, detail), families in reasons.items()
    ]


def page(rows: Mapping[str, Row]) -> str:
    """The text of docs/parity.md."""
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("vllm", "torch", "torch-npu", "transformers")
    )
    return "\n".join(
        [
            "# Parity with transformers",
            "",
            f"Written by `make parity`, with {versions}.",
            "",
            *table(rows),
            "",
            *remarks(rows),
            EXPLANATION,
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run the families, print the table and write the page; 1 if a cell is *no*."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--family", action="append", choices=sorted(FAMILIES.values()), help="repeatable")
    made.add_argument("--column", action="append", choices=COLUMNS, help="repeatable; default: all")
    args = made.parse_args(argv)
    os.environ.update(forks.ENVIRONMENT)
    began = time.monotonic()
    rows: dict[str, Row] = {}
    for title, name in FAMILIES.items():
        if args.family and name not in args.family:
            continue
        rows[title] = run_family(name, args.column or COLUMNS)
    print("\n".join([*table(rows), "", *remarks(rows)]))
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if not args.family and not args.column:
        PAGE.write_text(page(rows))
    return int(any(cell["value"] == "no" for cells in rows.values() for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
