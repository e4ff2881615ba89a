"""The text of docs/contract.md."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30

INTRODUCTION = """# The contract with torch_npu, and the memory of full-size models

This page is made by `make contract`; do not edit it. It fails if anything in it is wrong.

## Operators

Every torch_npu operator that `kernels/ops` calls, called with samples through torch_npu's own dispatcher, which refuses
what the schema does not take. *Meta = reference* says that the shapes and dtypes of torch_npu's Meta kernel are those
of our reference; the forms without a Meta kernel write into tensors that they are given.
"""

MODELS = """
## Full-size models

One rank of each model as vLLM builds it on this platform, with the published configuration and all of its layers, made
of FakeTensors on the device `npu`: shapes without data. It takes a prefill of new tokens, a prefill behind earlier
tokens, and a decode step ({tokens} tokens, {requests} requests, at most {longest} tokens each). The shapes of every
torch_npu operator are given to its reference too, which refuses what the device documents as refused. The other ranks
are a process group that moves nothing; where rows are sent to their experts, the host is told that they are spread
evenly.

Weights are in bfloat16 whatever the published format is; layers for multi-token prediction are left out. Sizes are GiB
per NPU of 64 GiB, of which 92 % may be used. *Traced* is the most that the tensors of a step took. The other columns
are the ledger of `npufleet plan memory`: its weights, tables, bytes of KV cache and HCCL groups equal the model's.
Where MC2 takes the decode step, the ledger also counts the group that larger small steps gather tokens through.

"""
COLUMNS = (
    "model",
    "chip",
    "layout",
    "parameters of a rank",
    "weights",
    "activations",
    "traced",
    "graphs",
    "HCCL",
    "KV bytes / token",
    "KV tokens",
    "longest request fits",
    "operators (distinct shapes)",
)

LEGEND = """
Without the device it is not known what operators take as workspace and what the driver keeps for each captured graph:
neither is counted. HCCL takes 2 × HCCL_BUFFSIZE (200 MB each) for each group of more than one rank that is used.
"""


def render(operators: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The page."""
    from contract_cases import LONGEST, REQUESTS, TOKENS

    lines = [INTRODUCTION, "| operator | samples | Meta = reference | schema |", "|---|---|---|---|"]
    for name, operator in operators.items():
        verdict = "yes" if operator["meta"] else "no Meta kernel"
        verdict = f"NO: {'; '.join(operator['errors'])}" if operator["errors"] else verdict
        schema = operator["schema"].replace("|", "\\|")
        lines.append(f"| `{name}` | {operator['samples']} | {verdict} | `{schema}` |")
    text = "\n".join(lines) + "\n"
    text += MODELS.format(tokens=f"{TOKENS:,}", requests=REQUESTS, longest=f"{LONGEST:,}")
    text += f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
    return text + "".join(_row(row) for row in rows) + LEGEND


def _row(row: dict[str, Any]) -> str:
    found = row["found"]
    shapes = sum(different for _, different in found["operators"].values())
    cells = [
        row["model"],
        row["chip"],
        row["layout"],
        f"{found['elements'] / 1e9:.2f} G",
        f"{row['weights'] / GIB:.2f}",
        f"{row['activations'] / GIB:.2f}",
        f"{max(found['activations'].values()) / GIB:.2f}",
        f"{row['graphs'] / GIB:.2f}",
        f"{row['hccl'] / GIB:.2f}",
        f"{found['kv_per_token']:,}",
        f"{row['kv_tokens']:,}",
        "yes" if row["fits"] else "no",
        f"{len(found['operators'])} ({shapes})" if not row["errors"] else f"FAILED: {row['errors'][0]}",
    ]
    return f"| {' | '.join(cells)} |\n"
