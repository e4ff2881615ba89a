"""Each override is still needed: its test fails when upstream offers another way, so that it can go."""

import ast
import inspect
import textwrap

import pytest
from vllm.v1.worker import gpu_model_runner

from npufleet.plugin.overrides import OVERRIDES, Override, apply_overrides


def cuda_names(source: str) -> set[str]:
    """The ``X`` of every call ``torch.cuda.X(...)`` in a piece of source."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.cuda."):
            found.add(ast.unparse(node.func).removeprefix("torch.cuda."))
    return found


def test_the_runner_still_calls_cuda_streams_and_events_by_name() -> None:
    output = cuda_names(inspect.getsource(gpu_model_runner.AsyncGPUModelRunnerOutput))
    assert {"Event", "stream", "current_stream"} <= output
    assert "Stream" in cuda_names(inspect.getsource(gpu_model_runner.GPUModelRunner))


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda x: x.name)
def test_every_override_says_why(override: Override) -> None:
    assert len(override.reason) > 40 and "vllm/" in override.reference


def test_applying_twice_changes_nothing_more() -> None:
    import torch

    apply_overrides()
    names = ("Stream", "Event", "stream", "current_stream", "default_stream", "set_stream")
    once = [getattr(torch.cuda, name) for name in names]
    apply_overrides()
    assert once == [getattr(torch.cuda, name) for name in names]
    assert torch.cuda.Stream is torch.npu.Stream
