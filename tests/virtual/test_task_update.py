"""Task groups: the host arguments of a captured call are replaced before a replay, or stay stale."""

from types import SimpleNamespace

import pytest
import torch

npu = torch.npu


def scaled(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    """A call with a host argument, which a graph freezes."""
    torch.mul(x, factor, out=out)


@pytest.fixture
def group() -> SimpleNamespace:
    x, out = torch.ones(3).npu(), torch.zeros(3).npu()
    graph, held = npu.NPUGraph(), []
    with npu.graph(graph):
        stream = npu.current_stream()
        npu.graph_task_group_begin(stream)
        scaled(x, out, 2.0)
        handle = npu.graph_task_group_end(stream)
        held.append(out + 1)
    return SimpleNamespace(x=x, out=out, graph=graph, handle=handle, result=held[0], side=npu.Stream())


def update(group, call) -> None:
    with npu.stream(group.side):
        npu.graph_task_update_begin(group.side, group.handle)
        call()
        npu.graph_task_update_end(group.side)


def test_without_an_update_the_arguments_are_stale(group):
    group.graph.replay()
    group.graph.replay()
    assert group.result.tolist() == [3] * 3


def test_an_update_takes_effect_at_the_next_replay(group):
    group.graph.replay()
    group.side.wait_stream(npu.current_stream())
    update(group, lambda: scaled(group.x, group.out, 10.0))
    assert group.result.tolist() == [3] * 3  # an update runs nothing
    group.graph.replay()
    assert group.result.tolist() == [11] * 3
    update(group, lambda: scaled(group.x, group.out, 5.0))
    group.graph.replay()
    assert group.result.tolist() == [6] * 3


def test_views_are_no_part_of_an_update(group):
    update(group, lambda: scaled(group.x.view(3)[:], group.out, 4.0))
    group.graph.replay()
    assert group.result.tolist() == [5] * 3


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (lambda group: torch.add(group.x, 1, out=group.out), "aten::add.out"),
        (lambda group: None, "nothing"),
        (lambda group: [scaled(group.x, group.out, 1.0) for _ in range(2)], "aten::mul.out, aten::mul.out"),
    ],
)
def test_an_update_must_repeat_the_calls_of_its_group(group, call, given):
    with pytest.raises(RuntimeError, match=f"captured aten::mul.out, given {given}"):
        update(group, lambda: call(group))
    group.graph.replay()
    assert group.result.tolist() == [3] * 3


def test_an_update_with_a_call_that_allocates_is_refused(group):
    with npu.stream(group.side):
        npu.graph_task_update_begin(group.side, group.handle)
        with pytest.raises(RuntimeError, match="allocates its results"):
            group.x * 2
        with pytest.raises(RuntimeError, match="given nothing"):
            npu.graph_task_update_end(group.side)


def test_a_group_must_be_closed_and_needs_a_capture():
    with pytest.raises(RuntimeError, match="needs a capture"):
        npu.graph_task_group_begin(npu.Stream())
    with pytest.raises(RuntimeError, match="inside a task group"), npu.graph(npu.NPUGraph()):
        npu.graph_task_group_begin(npu.current_stream())


@pytest.fixture
def gated():
    """A graph that waits for an external event before its task group."""
    x, out = torch.ones(3).npu(), torch.zeros(3).npu()
    event, side, graph, held = npu.ExternalEvent(), npu.Stream(), npu.NPUGraph(), []
    event.record(side)  # makes the event: torch_npu ignores a wait for one that does not exist yet
    event.reset(side)
    with npu.graph(graph):
        stream = npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        npu.graph_task_group_begin(stream)
        scaled(x, out, 2.0)
        handle = npu.graph_task_group_end(stream)
        held.append(out + 1)
    yield SimpleNamespace(x=x, out=out, graph=graph, handle=handle, result=held[0], side=side, event=event)
    event.record(side)  # let a waiting replay go on


@pytest.mark.parametrize("order", ["update first", "replay first"])
def test_a_replay_waits_for_its_external_event(gated, order):
    for factor in (4.0, 7.0):
        if order == "replay first":
            gated.graph.replay()
        update(gated, lambda factor=factor: scaled(gated.x, gated.out, factor))
        gated.event.record(gated.side)
        if order == "update first":
            gated.graph.replay()
        assert gated.result.tolist() == [factor + 1] * 3


def test_work_behind_a_waiting_replay_is_refused(gated):
    gated.graph.replay()
    with pytest.raises(RuntimeError, match="waits for an external event"):
        gated.x + 1
    with pytest.raises(RuntimeError, match="waits for an external event"):
        npu.synchronize()
    with pytest.raises(RuntimeError, match="still running"):
        gated.graph.replay()
    gated.event.record(gated.side)
    assert gated.result.tolist() == [3] * 3


def test_torch_npu_s_own_update_of_fused_attention():
    """``auto_dispatch_capture`` swaps the call for its out= form, and ``update`` replaces its lengths."""
    import torch_npu

    heads, size, block = 2, 32, 16
    cache = torch.randn(6, block, heads * size, generator=torch.Generator().manual_seed(1)).npu()
    query = torch.randn(2, heads, size, generator=torch.Generator().manual_seed(2)).npu()
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32).npu()
    mask = torch.triu(torch.ones(2048, 2048, dtype=torch.int8), 1).npu()

    def attend(lengths: list[int]) -> torch.Tensor:
        return torch_npu.npu_fused_infer_attention_score(
            query, cache, cache, num_heads=heads, num_key_value_heads=heads, input_layout="TND", scale=0.2,
            block_table=table, block_size=block, sparse_mode=3, atten_mask=mask,
            actual_seq_lengths=[1, 2], actual_seq_lengths_kv=lengths,
        )[0]  # fmt: skip

    graph = npu.NPUGraph()
    with npu.graph(graph, auto_dispatch_capture=True):
        out = attend([5, 7])
    graph.replay()
    assert torch.equal(out, attend([5, 7]))
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [20, 33]}])
    graph.replay()
    assert torch.equal(out, attend([20, 33]))
    assert not torch.equal(out, attend([5, 7]))


def waits_on_its_stream(group) -> None:
    group.side.wait_stream(npu.current_stream())


def host_waits_for_the_stream(group) -> None:
    npu.current_stream().synchronize()


def host_waits_for_an_event(group) -> None:
    event = npu.Event()
    event.record()
    event.synchronize()


def host_sees_an_event(group) -> None:
    event = npu.Event()
    event.record()
    assert event.query()


def host_reads_a_result(group) -> None:
    group.result.tolist()


def another_stream_in_between(group) -> None:
    event, between = npu.Event(), npu.Stream()
    between.wait_stream(npu.current_stream())
    event.record(between)
    group.side.wait_event(event)


def nothing_waits(group) -> None:
    pass


def waits_for_what_lay_before(group) -> None:
    group.side.wait_event(group.early)


def waits_for_an_event_that_nobody_recorded(group) -> None:
    group.side.wait_event(npu.Event())


def another_stream_waits(group) -> None:
    npu.Stream().wait_stream(npu.current_stream())


@pytest.mark.parametrize(
    "wait",
    [
        waits_on_its_stream,
        host_waits_for_the_stream,
        host_waits_for_an_event,
        host_sees_an_event,
        host_reads_a_result,
        another_stream_in_between,
    ],
)
def test_an_update_behind_the_last_replay(group, wait):
    for factor in (2.0, 3.0):
        group.graph.replay()
        wait(group)
        update(group, lambda factor=factor: scaled(group.x, group.out, factor))
    group.graph.replay()
    assert group.result.tolist() == [4] * 3


@pytest.mark.parametrize(
    "wait",
    [nothing_waits, waits_for_what_lay_before, waits_for_an_event_that_nobody_recorded, another_stream_waits],
)
def test_an_update_that_the_last_replay_may_overtake_is_refused(group, wait):
    group.graph.replay()
    group.early = npu.Event()
    group.early.record()
    group.graph.replay()
    wait(group)
    with pytest.raises(RuntimeError, match="updated while a replay before may still run"):
        update(group, lambda: scaled(group.x, group.out, 10.0))
    npu.synchronize()
    update(group, lambda: scaled(group.x, group.out, 10.0))
    group.graph.replay()
    assert group.result.tolist() == [11] * 3
