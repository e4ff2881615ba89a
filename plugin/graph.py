"""ACL graphs: a whole decode step is captured once per batch size and replayed.

The fused attention operator takes the sequence lengths from the host, so they are part of what is captured.
Each attention call is therefore captured as a *task group*, and before a replay every group is given the new
lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available

from .attention.capture import CapturedStep, Workspaces, recording
from .attention.metadata import DenseMetadata
from .attention.mla_metadata import LatentMetadata


@dataclass(kw_only=True)
class CapturedGraph:
    """A captured step of one batch size."""

    graph: Any
    """torch.npu.NPUGraph."""
    attention: CapturedStep
    output: Any
    """What the model returned: tensors in the graph's memory, overwritten by each replay."""
    replayed: Any
    """torch.npu.Event behind the latest replay."""


class ACLGraphWrapper(CUDAGraphWrapper):
    """vLLM's graph wrapper over NPU graphs. A subclass, because the runner looks for that class to unwrap a
    model.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        vllm_config: VllmConfig,
        runtime_mode: CUDAGraphMode,
        **kwargs: Any,
    ) -> None:
        super().__init__(runnable, vllm_config, runtime_mode, **kwargs)
        self._graphs: dict[Any, CapturedGraph] = {}
        self._workspaces: Workspaces = {}
        self._update_stream = torch.npu.Stream()

    def clear_graphs(self) -> None:
        """Drop all graphs and their memory."""
        super().clear_graphs()
        self._graphs.clear()
        self._workspaces.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run, capture or replay the model, as the forward context's mode and batch size say."""
        if not is_forward_context_available():
            return self.runnable(*args, **kwargs)
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode:
            return self.runnable(*args, **kwargs)
        captured = self._graphs.get(context.batch_descriptor)
        if captured is None:
            return self._capture(context.batch_descriptor, args, kwargs)
        self._update(captured, context.attn_metadata)
        captured.graph.replay()
        captured.replayed.record()
        return captured.output

    def _capture(self, descriptor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Capture the step on the current stream, which must not be the default one."""
        validate_cudagraph_capturing_enabled()
        stream = torch.npu.current_stream()
        graph = torch.npu.NPUGraph()
        step = CapturedStep(stream, self._workspaces)
        with torch.npu.graph(graph, pool=self.graph_pool, stream=stream), recording(step):
            output = self.runnable(*args, **kwargs)
        self._graphs[descriptor] = CapturedGraph(
            graph=graph, attention=step, output=output, replayed=torch.npu.Event()
        )
        return output

    def _update(self, captured: CapturedGraph, metadata: Any) -> None:
        """Give the graph's attention calls this step's lengths, on a stream of their own.

        The device may still be running the previous replay of the graph when the host gets here, so the
        update stream waits for it. The graph in turn waits inside, at each attention call, for that call's
        update.
        """
        step = next(x for x in metadata.values() if isinstance(x, (DenseMetadata, LatentMetadata)))
        self._update_stream.wait_event(captured.replayed)
        captured.attention.update(self._update_stream, step.query_ends, step.kv_lens)
