"""The attention calls of a captured decode step, so that a replay can be given new sequence lengths."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from npufleet.kernels.ops.attention import CapturedAttention, PagedAttentionCall, update_all
from npufleet.kernels.ops.mla import LatentAttentionCall

Call: TypeAlias = PagedAttentionCall | LatentAttentionCall
Workspaces = dict[tuple[Any, ...], torch.Tensor]


class CapturedStep:
    """Records the attention calls of one graph while it is captured."""

    def __init__(self, stream: Any, workspaces: Workspaces) -> None:
        """:param stream: the stream that is captured.
        :param workspaces: scratch memory by kind of call, shared by all graphs: they never run at the same
            time.
        """
        self._stream = stream
        self._workspaces = workspaces
        self._calls: list[CapturedAttention] = []

    def attend(self, call: Call, query_ends: list[int], kv_lens: list[int]) -> None:
        """Capture one attention call; the lengths here are those of the capture only."""
        call = self._with_workspace(call, query_ends, kv_lens)
        self._calls.append(call.capture(self._stream, query_ends, kv_lens))

    def update(self, stream: Any, query_ends: list[int], kv_lens: list[int]) -> None:
        """Give all calls the lengths of the next replay, on ``stream``. All layers of a step have the same
        ones.
        """
        update_all(self._calls, stream, query_ends, kv_lens)

    def _with_workspace(self, call: Call, query_ends: list[int], kv_lens: list[int]) -> Call:
        """``call`` with scratch memory: that of a larger batch where there is one, as batches shrink from
        graph to graph."""
        kind = call.kind
        workspace = self._workspaces.get((*kind, call.query.shape[0]))
        if workspace is None:
            workspace = call.get_workspace(query_ends, kv_lens)
            largest = self._workspaces.get(kind)
            if largest is not None and largest.numel() >= workspace.numel():
                workspace = largest
            self._workspaces[kind] = self._workspaces[(*kind, call.query.shape[0])] = workspace
        return replace(call, workspace=workspace)


_recorder: CapturedStep | None = None


def recorder() -> CapturedStep | None:
    """The step that is being captured in this process, None outside a capture."""
    return _recorder


@contextmanager
def recording(step: CapturedStep) -> Iterator[None]:
    """Send the attention calls made inside to ``step``."""
    global _recorder
    assert _recorder is None
    _recorder = step
    try:
        yield
    finally:
        _recorder = None
