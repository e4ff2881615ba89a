"""Every torch_npu operator that kernels/ops calls: its schema, and its Meta kernel against its reference.

The calls are the samples of ``tests/kernels/test_schemas.py``, made for real on the first NPU. Run as a script, it
prints one line of JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tests.kernels.test_schemas import Recorder, called_in_source, differences, qualified, sample_calls


@dataclass(kw_only=True)
class Operator:
    """One operator of torch_npu."""

    schema: str
    samples: int = 0
    meta: bool = True
    """Whether torch_npu has a Meta kernel for it."""
    errors: list[str] = field(default_factory=list)


def examine() -> dict[str, Operator]:
    """Operator → what its sample calls showed. A call that the schema does not take does not get here: the
    dispatcher raises.
    """
    with Recorder() as recorder:
        for sample in sample_calls(torch.device("npu:0")):
            sample()
    found: dict[str, Operator] = {}
    for func, args, kwargs, result in recorder.calls:
        operator = found.setdefault(qualified(func), Operator(schema=_schema(func)))
        operator.samples += 1
        wrong = differences(func, args, kwargs, result)
        operator.meta = wrong is not None
        operator.errors += wrong or []
    seen = {name.partition("::")[2] for name in found}
    for name in sorted(called_in_source() - seen):
        found[f"npu::{name}"] = Operator(schema="", errors=["called in kernels/ops, but no sample calls it"])
    return dict(sorted(found.items()))


def _schema(func: Any) -> str:
    return str(func._schema if hasattr(func, "_schema") else func.default._schema)


if __name__ == "__main__":
    print(json.dumps({name: asdict(operator) for name, operator in examine().items()}))
