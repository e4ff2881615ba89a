"""Which models the contract report looks at, in which layouts, and how one of them is compared with the ledger.

Run as a script with a chip and names of models, it prints one line of JSON: it is the process whose virtual NPUs are
of that chip.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from npufleet.cluster.plan.memory import Ledger, Limits, of_rank
from npufleet.cluster.plan.model import from_config
from npufleet.cluster.plan.shared import AUTO, OVERLAP, PLACEMENT, RANKS, SharedExperts
from npufleet.cluster.plan.weights import Layout

PUBLISHED = Path(__file__).resolve().parent / "published"
DEVICES = {"A2": "virtual:16:Ascend910B3", "A3": "virtual:16:Ascend910_9391"}
TOKENS, REQUESTS, LONGEST = 4096, 64, 32768
"""Of the steps that are taken; requests are as long as this or as the model allows."""
Split = tuple[int, int, bool] | tuple[int, int, bool, int]
DENSE: dict[str, list[Split]] = {"A2": [(8, 1, False), (16, 1, False)], "A3": [(16, 1, False)]}
LAYOUTS: dict[str, dict[str, list[Split]]] = {
    "llama-3-8b": {"A2": [(1, 1, False), (8, 1, False)], "A3": [(2, 1, False)]},
    "llama-3-70b": DENSE,
    "qwen2-72b": DENSE,
    "qwen3-32b": {"A2": [(4, 1, False), (8, 1, False)], "A3": [(16, 1, False)]},
    "mixtral-8x7b": {"A2": [(4, 1, False), (8, 1, True)], "A3": [(4, 2, True)]},
    "qwen3-235b-a22b": {
        "A2": [(16, 1, True), (8, 2, True)],
        "A3": [(16, 1, True), (4, 8, True), (16, 1, True, 4)],
    },
    "glm-4.5-air": {"A2": [(8, 1, False), (8, 1, True)], "A3": [(8, 2, True)]},
    "glm-4.5": {"A2": [(16, 1, True), (8, 2, True)], "A3": [(16, 1, True), (8, 4, True)]},
    "deepseek-v2-lite": {"A2": [(1, 1, False), (4, 1, True)], "A3": [(2, 2, True)]},
    "deepseek-v2": {"A2": [(16, 1, True), (8, 2, True)], "A3": [(16, 1, True), (4, 8, True)]},
    "deepseek-v3": {
        "A2": [(16, 2, True), (8, 4, True)],
        "A3": [(16, 2, True), (4, 8, True), (8, 8, True), (16, 2, True, 16)],
    },
    "kimi-k2": {"A2": [(16, 4, True)], "A3": [(16, 2, True), (16, 4, True), (4, 16, True)]},
}
"""Model → chip → (tensor parallel, data parallel, expert parallel[, decode context parallel]): layouts in use on nodes
of 8 (A2) and 16 (A3).
"""
WHOLE, SPLIT = SharedExperts(placement="replicated"), SharedExperts(placement="tensor-parallel")
BESIDE, ALONE = SharedExperts(placement="replicated", overlap=True), SharedExperts(ranks=2)
PLACED: dict[str, dict[str, list[tuple[tuple[int, int, bool], SharedExperts, int]]]] = {
    "deepseek-v2-lite": {
        "A2": [((4, 1, True), WHOLE, 0)],
        "A3": [
            ((2, 2, True), SPLIT, 0),
            ((4, 1, True), BESIDE, 0),
            ((4, 1, True), ALONE, 0),
            ((4, 1, True), ALONE, 3),
        ],
    },
    "glm-4.5-air": {"A3": [((8, 2, True), WHOLE, 0)]},
}
"""Model → chip → layouts with shared experts elsewhere than vLLM puts them, each with the rank that is looked at."""
GROUPS = {
    "tp": "tensor parallel",
    "dcp": "decode context parallel",
    "dp": "data parallel",
    "ep": "expert parallel",
    "mc2": "dispatch and combine",
}
TOLERANCE = 0.01
"""By how much a step may take more memory than the ledger says: small tensors that it does not count."""


def limits(config: dict[str, Any], chip: str) -> Limits:
    """What bounds the steps that are taken."""
    return Limits(
        chip=chip,
        max_num_batched_tokens=TOKENS,
        max_num_seqs=REQUESTS,
        max_model_len=min(config["max_position_embeddings"], LONGEST),
    )


def examine(
    name: str,
    chip: str,
    layout: Split,
    shared: SharedExperts | None = None,
    rank: int = 0,
) -> dict[str, Any]:
    """The forward pass of one rank, held against the ledger; plain data for the page."""
    from contract_forward import Case, Outcome, run

    published = json.loads((PUBLISHED / f"{name}.json").read_text())
    config, (tensor, data, expert_parallel, *more) = published["config"], layout
    context = more[0] if more else 1
    bounds = limits(config, chip)
    placed = shared or SharedExperts()
    kind = Layout(
        tensor=tensor,
        data=data,
        expert_parallel=expert_parallel,
        context=context,
        shared=placed,
        on_shared_rank=rank < placed.ranks,
    )
    planned = of_rank(from_config(config), kind, bounds)
    assert bounds.max_model_len is not None
    case = Case(
        name=name,
        config=config,
        tensor=tensor,
        data=data,
        expert_parallel=expert_parallel,
        context=context,
        tokens=TOKENS,
        requests=REQUESTS,
        max_model_len=bounds.max_model_len,
        options=options_of(placed),
        rank=rank,
    )
    found: Outcome = run(case)
    text = f"TP{tensor}" + (f" DCP{context}" if context > 1 else "") + (f" DP{data}" if data > 1 else "")
    return {
        "name": name,
        "model": published["model"],
        "chip": chip,
        "layout": text + (f" EP{tensor * data}" if expert_parallel else "") + described(kind),
        "ranks": tensor * data,
        "found": asdict(found),
        "weights": planned.weight_bytes,
        "activations": planned.activations,
        "graphs": planned.graphs,
        "hccl": planned.hccl,
        "groups": planned.groups,
        "kv_tokens": planned.kv_tokens,
        "fits": planned.fits,
        "errors": [*found.errors, *against(planned, asdict(found))],
    }


def options_of(shared: SharedExperts) -> dict[str, Any]:
    """What ``additional_config`` says of a placement."""
    options = {PLACEMENT: shared.placement, RANKS: shared.ranks, OVERLAP: shared.overlap}
    return {name: value for name, value in options.items() if value not in (AUTO, 0, False)}


def described(layout: Layout) -> str:
    """A placement of shared experts, for the page."""
    shared = layout.shared
    if shared.ranks:
        kind = "shared" if layout.on_shared_rank else "routed"
        return f", shared experts on {shared.ranks} ranks alone (a rank with {kind} ones)"
    name = "" if shared.placement == AUTO else f", shared experts {shared.placement}"
    return name + (" and overlapped" if shared.overlap else "")


def against(planned: Ledger, found: dict[str, Any]) -> list[str]:
    """Where the ledger is not what the model counts."""
    pairs = {
        "elements of weights": (sum(part.elements for part in planned.weights), found["elements"]),
        "bytes of weights": (sum(part.bytes for part in planned.weights), found["weights"]),
        "bytes derived from weights": (sum(part.bytes for part in planned.derived), found["derived"]),
        "bytes of KV cache per token": (planned.kv_per_token, found["kv_per_token"]),
        "HCCL groups": (sorted(planned.groups), _groups(planned, found)),
    }
    errors = [f"{what}: the ledger has {a}, the model {b}" for what, (a, b) in pairs.items() if a != b]
    peak = max(found["activations"].values())
    if not peak * (1 - TOLERANCE) <= planned.activations:
        errors.append(f"activations: the ledger has {planned.activations} bytes, a step took {peak}")
    return errors


def _groups(planned: Ledger, found: dict[str, Any]) -> list[str]:
    """The groups that the model used, and the one that steps too large for MC2 would gather tokens through: the
    steps here are not of that size.
    """
    used = {GROUPS.get(name, name) for name in found["groups"]}
    if "dispatch and combine" in used:
        used |= {"data parallel"} & set(planned.groups)
    return sorted(used)


def main() -> None:
    """``contract_cases.py CHIP MODEL …``: examine the models in their layouts on the chip."""
    chip, names = sys.argv[1], sys.argv[2:]
    rows = []
    for name in names:
        cases = [(layout, None, 0) for layout in LAYOUTS[name][chip]]
        for layout, shared, rank in (*cases, *PLACED.get(name, {}).get(chip, [])):
            row = examine(name, chip, layout, shared, rank)
            verdict = "wrong" if row["errors"] else "as the ledger says"
            took = row["found"]["seconds"]
            print(f"{name} on {chip}, {row['layout']}: {verdict} ({took:.0f} s)", file=sys.stderr, flush=True)
            rows.append(row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
