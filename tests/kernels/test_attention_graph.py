"""The attention inside a captured graph: replays follow the lengths that they are given."""

import pytest
import torch

from npufleet.kernels.ops import attention

from .formulas import assert_close
from .paged import PagedCase, make_case

SCALE = 0.3


def capture(case: PagedCase, device: torch.device, window: int | None = None, stream=None):
    """A graph of query + 1 → attention → · 2, and what it works on."""
    tensors = dict(
        zip(("query", "key_cache", "value_cache", "block_table"), case.tensors(device), strict=True)
    )
    source = tensors["query"].clone()
    call = attention.PagedAttentionCall(
        **tensors, out=torch.empty_like(source), scale=SCALE, sliding_window=window
    )
    call.launch(case.query_ends, case.kv_lens)  # creates the mask outside the graph
    workspace = call.get_workspace(case.query_ends, case.kv_lens)
    call = attention.PagedAttentionCall(
        **tensors, out=call.out, scale=SCALE, sliding_window=window, workspace=workspace
    )
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=stream):
        call.query.copy_(source)
        captured = call.capture(torch.npu.current_stream(), case.query_ends, case.kv_lens)
        result = call.out * 2
    return graph, captured, source, call, result


def replay(graph, captured, ends: list[int], kv_lens: list[int]) -> None:
    captured.update(torch.npu.Stream(), ends, kv_lens)
    graph.replay()
    torch.npu.synchronize()


@pytest.mark.parametrize("window", [None, 6])
def test_replays_follow_new_queries_and_lengths(device, window):
    case = make_case([(1, 40), (1, 40), (1, 40)])
    graph, captured, source, _, result = capture(case, device, window)
    for lengths in ([40, 40, 40], [1, 17, 33], [16, 5, 40]):
        shorter = PagedCase(
            query=torch.randn_like(case.query),
            key_cache=case.key_cache,
            value_cache=case.value_cache,
            block_table=case.block_table,
            query_lengths=case.query_lengths,
            kv_lens=lengths,
            keys=[key[:n] for key, n in zip(case.keys, lengths, strict=True)],
            values=[value[:n] for value, n in zip(case.values, lengths, strict=True)],
        )
        source.copy_(shorter.query)
        replay(graph, captured, shorter.query_ends, lengths)
        assert_close(result, shorter.expected(SCALE, window) * 2)


@pytest.mark.parametrize("order", ["update first", "replay first"])
def test_a_replay_waits_for_its_lengths(device, order):
    """Neither order may use the lengths of an earlier replay."""
    case = make_case([(1, 30), (1, 30)])
    graph, captured, _, _, result = capture(case, device)
    for lengths in ([30, 30], [30, 7], [2, 30]):
        if order == "replay first":
            graph.replay()
            with pytest.raises(RuntimeError, match="waits for an external event"):
                torch.npu.synchronize()
        captured.update(torch.npu.Stream(), case.query_ends, lengths)
        if order == "update first":
            graph.replay()
        error = (result.cpu().double() - case.expected(SCALE).double() * 2).abs().amax(dim=(1, 2))
        assert (error < 1e-4).tolist() == [length == 30 for length in lengths]


def test_any_stream_may_be_captured(device):
    """torch's pool of streams is finite: sooner or later the captured one is one that was made before."""
    case = make_case([(1, 12)])
    for stream in [torch.npu.Stream() for _ in range(32)]:
        graph, captured, _, _, result = capture(case, device, stream=stream)
        replay(graph, captured, case.query_ends, case.kv_lens)
        assert_close(result, case.expected(SCALE) * 2)


def test_a_padding_request_in_a_replay(device):
    case = make_case([(1, 20), (1, 20)])
    graph, captured, _, _, result = capture(case, device)
    replay(graph, captured, [1, 2], [20, 0])
    assert torch.equal(result[1].cpu(), torch.zeros(6, 16))
    assert_close(result[:1], case.expected(SCALE)[:1] * 2)


def test_the_block_table_is_read_at_each_replay(device):
    case = make_case([(1, 20), (1, 20)])
    graph, captured, source, call, result = capture(case, device)
    call.block_table.copy_(case.block_table.flip(0))
    source.copy_(case.query.flip(0))
    replay(graph, captured, [1, 2], [20, 20])
    assert_close(result.flip(0), case.expected(SCALE) * 2)


def test_graphs_share_nothing(device):
    first, second = make_case([(1, 30)], seed=1), make_case([(1, 9), (1, 12)], seed=2)
    captures = [capture(case, device) for case in (first, second)]
    for case, (graph, captured, _, _, result) in zip((first, second), captures, strict=True):
        replay(graph, captured, case.query_ends, case.kv_lens)
        assert_close(result, case.expected(SCALE) * 2)


def test_the_captured_call_does_not_own_query_and_output(device):
    case = make_case([(1, 8)])
    _, captured, _, call, _ = capture(case, device)
    assert captured.call.query.data_ptr() == call.query.data_ptr()
    assert captured.call.out.data_ptr() == call.out.data_ptr()
    before = torch.npu.memory_allocated()
    big = torch.empty(1 << 20, device=device)
    weak = attention.weak_reference(big)
    del big
    assert torch.npu.memory_allocated() == before and weak.shape == (1 << 20,)


def test_the_workspace_is_bytes_on_the_device(device):
    case = make_case([(1, 8)])
    _, captured, *_ = capture(case, device)
    workspace = captured.call.workspace
    assert workspace.device == device and workspace.numel() > 0
