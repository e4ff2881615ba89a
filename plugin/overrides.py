"""What we change in vLLM or torch because there is no hook for it: every such change is here.

Each override says why it exists and what upstream would have to offer instead, and has a test that fails once
upstream no longer needs it. All other integration goes through vLLM's own extension points.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Override:
    """One change of upstream behaviour."""

    name: str
    reason: str
    reference: str
    """Where upstream has the code that makes it necessary."""
    apply: Callable[[], None]
    """Make the change; a second call changes nothing."""


def _cuda_names_to_npu() -> None:
    """Point the stream, event and graph names of ``torch.cuda`` at those of ``torch.npu``."""
    cuda, npu = torch.cuda, torch.npu
    if getattr(cuda, "_npufleet", False):
        return

    def event(*args: object, blocking: bool | None = None, **kwargs: object) -> object:
        """An NPU event; ``blocking`` chooses how CUDA waits and has no counterpart."""
        return npu.Event(*args, **kwargs)

    names: dict[str, object] = {
        "Stream": npu.Stream,
        "Event": event,
        "stream": functools.partial(npu.stream),
        "current_stream": functools.partial(npu.current_stream),
        "default_stream": functools.partial(npu.default_stream),
        "set_stream": functools.partial(npu.set_stream),
    }
    for name, value in names.items():
        setattr(cuda, name, value)
    cuda._npufleet = True  # type: ignore[attr-defined]


OVERRIDES = (
    Override(
        name="torch.cuda streams and events",
        reason=(
            "The model runner copies sampled tokens to the host beside the next step (asynchronous "
            "scheduling) on torch.cuda.Stream and torch.cuda.Event by those names, with no hook for "
            "another device."
        ),
        reference=(
            "vllm/v1/worker/gpu_model_runner.py: AsyncGPUModelRunnerOutput and GPUModelRunner.__init__; "
            "vLLM's own XPU runner does the same in vllm/v1/worker/xpu_model_runner.py: _torch_cuda_wrapper"
        ),
        apply=_cuda_names_to_npu,
    ),
)


def apply_overrides() -> None:
    """Apply every override in this process; called by the worker before it builds its model runner."""
    for override in OVERRIDES:
        override.apply()
