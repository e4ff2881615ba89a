"""Graphs: a replay computes again, and a capture refuses what a device refuses."""

import pytest
import torch
import torch_npu

CODE = "107030"


def captured(body) -> torch.npu.NPUGraph:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        body()
    return graph


def other_streams(count: int) -> list[torch.npu.Stream]:
    """Streams that differ from each other and from the one that captures: torch_npu deals them out of a pool."""
    captured(lambda: None)  # now there is a capturing stream
    seen = {torch.npu.graph.default_capture_stream.npu_stream}
    streams = []
    while len(streams) < count:
        stream = torch.npu.Stream()
        if stream.npu_stream not in seen:
            seen.add(stream.npu_stream)
            streams.append(stream)
    return streams


def test_replay_recomputes_from_what_the_inputs_hold_now():
    x, w, g = torch.randn(4, 8).npu(), torch.randn(8, 8).npu(), torch.ones(8).npu()
    results = []
    graph = captured(
        lambda: results.append(torch_npu.npu_rms_norm(torch.relu(x @ w) + 1, g, 1e-6)[0].sum(-1))
    )
    for seed in range(3):
        x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        want = torch_npu.npu_rms_norm(torch.relu(x @ w) + 1, g, 1e-6)[0].sum(-1)
        assert torch.equal(results[0], want)


def test_capture_changes_nothing_and_replay_counts():
    counter, out = torch.zeros(1).npu(), torch.full((2,), 7.0).npu()

    def body():
        counter.add_(1)
        torch.add(counter, 1, out=out[:1])

    graph = captured(body)
    assert counter.item() == 0
    assert out.tolist() == [7, 7]
    graph.replay()
    graph.replay()
    assert counter.item() == 2
    assert out.tolist() == [3, 7]


def test_results_of_several_tensors_and_views():
    x = torch.randn(6, 4).npu()
    held = []

    def body():
        values, indices = x.topk(2)
        first, second = x.split(3)
        held.extend([values, indices, first * 2, second + first, x.t().contiguous()])

    graph = captured(body)
    x.copy_(torch.randn(6, 4))
    graph.replay()
    want = [*x.topk(2), x[:3] * 2, x[3:] + x[:3], x.t().contiguous()]
    assert all(torch.equal(got, expected) for got, expected in zip(held, want, strict=True))


def test_memory_of_a_graph_is_reused_inside_it():
    x = torch.ones(1 << 20).npu()
    torch.npu.synchronize()
    before = torch.npu.memory_allocated()
    held = []

    def body():
        y = x
        for _ in range(20):
            y = y + 1
        held.append(y)

    graph = captured(body)
    assert torch.npu.memory_allocated() - before < 12 << 20
    graph.replay()
    assert held[0][0].item() == 21


def test_inputs_stay_alive_as_long_as_the_graph():
    held = []

    def make():
        x = torch.full((1 << 16,), 3.0).npu()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            held.append(x * 2)
        return graph

    graph = make()
    noise = [torch.rand(1 << 16, device="npu") for _ in range(8)]
    graph.replay()
    assert held[0].unique().tolist() == [6.0], len(noise)


def test_random_numbers_differ_between_replays_and_follow_the_seed():
    held = []
    graph = captured(lambda: held.append(torch.rand(4, device="npu")))
    torch.npu.manual_seed(5)
    graph.replay()
    first = held[0].clone()
    graph.replay()
    assert not torch.equal(held[0], first)
    torch.npu.manual_seed(5)
    graph.replay()
    assert torch.equal(held[0], first)


WAITS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "to the host": lambda x: x.cpu(),
    "copy to pageable memory": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "from pageable memory": lambda x: x.copy_(torch.ones(4)),
    "new tensor from host data": lambda x: torch.tensor([1.0], device="npu"),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "synchronize the device": lambda x: torch.npu.synchronize(),
    "synchronize the stream": lambda x: torch.npu.current_stream().synchronize(),
    "if on a value": lambda x: bool(x[0] > 0),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_for_the_device_is_refused_in_a_capture(name):
    x = torch.ones(4).npu()
    with pytest.raises(RuntimeError) as raised:
        captured(lambda: WAITS[name](x + 1 if name == "item" else x))
    first = raised.value.__context__ or raised.value  # ending the capture fails as well
    assert CODE in str(first)
    assert "captur" in str(first)
    assert "507903" in str(raised.value)  # the capture is invalidated
    held = []
    graph = captured(lambda: held.append(x + 1))
    graph.replay()
    assert held[0].tolist() == [2] * 4  # and the next one works


def test_pinned_asynchronous_copies_are_captured():
    host, x, back = torch.ones(4).pin_memory(), torch.zeros(4).npu(), torch.zeros(4).pin_memory()

    def body():
        x.copy_(host, non_blocking=True)
        back.copy_(x * 3, non_blocking=True)

    graph = captured(body)
    assert back.tolist() == [0] * 4
    host.fill_(5)
    graph.replay()
    assert x.tolist() == [5] * 4
    assert back.tolist() == [15] * 4


def test_other_streams_join_through_events_and_unjoined_ones_run_at_once():
    x, free = torch.ones(2).npu(), torch.ones(2).npu()
    side, apart = other_streams(2)
    held = []

    def body():
        main = torch.npu.current_stream()
        y = x * 2
        side.wait_stream(main)
        with torch.npu.stream(side):
            z = y + 1
        main.wait_stream(side)
        held.append(z * 10)
        with torch.npu.stream(apart):
            free.add_(1)

    graph = captured(body)
    assert free.tolist() == [2, 2]
    x.fill_(4)
    graph.replay()
    assert held[0].tolist() == [90, 90]
    assert free.tolist() == [2, 2]


def test_a_failing_step_names_itself():
    x, i = torch.ones(4).npu(), torch.tensor([1]).npu()
    graph = captured(lambda: x.index_select(0, i))
    i.fill_(9)
    with pytest.raises(RuntimeError, match=r"step 0 \(aten::index_select\) of graph \d+"):
        graph.replay()
