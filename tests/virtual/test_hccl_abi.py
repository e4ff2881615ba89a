"""HCCL of the virtual NPU at its C functions: errors, deadlines, messages, sub groups. No torch here."""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from .hccl_abi import (
    FP32,
    INT32,
    NOT_SUPPORT,
    PARA,
    REMOTE,
    SUM,
    TIMEOUT,
    Hccl,
    HcclError,
    Rank,
    floats,
    launch,
    u64,
)
from .hccl_launch import errors, values


def sum_of_ranks(me: Rank, comm: ctypes.c_void_p) -> list[float]:
    data = floats(me.rank + 1, 10 * (me.rank + 1))
    me.hccl.AllReduce(data, data, 2, FP32, SUM, comm, None)
    return list(data)


def _join_and_sum(me: Rank) -> Any:
    comm = me.join()
    result = sum_of_ranks(me, comm)
    me.hccl.Barrier(comm, None)
    me.hccl.CommDestroy(comm)
    return result


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_all_reduce_of_any_number_of_ranks(ranks: int) -> None:
    total = ranks * (ranks + 1) / 2
    assert values(launch(_join_and_sum, ranks)) == [[total, 10 * total]] * ranks


def _large(me: Rank) -> Any:
    """More than a slot, from enough ranks that each reduces a part."""
    comm = me.join()
    n = (1 << 20) // 4 + 12345
    data = (ctypes.c_float * n)(*[(i % 97) * (me.rank + 1) for i in range(n)])
    me.hccl.AllReduce(data, data, n, FP32, SUM, comm, None)
    factor = sum(range(1, me.ranks + 1))
    return all(value == (i % 97) * factor for i, value in enumerate(data))


@pytest.mark.parametrize("ranks", [2, 5])
def test_all_reduce_larger_than_a_slot(ranks: int) -> None:
    assert values(launch(_large, ranks)) == [True] * ranks


def _die_before_all_reduce(me: Rank) -> Any:
    comm = me.join()
    me.hccl.Barrier(comm, None)
    if me.rank == 1:
        me.die()
    codes = []
    for _ in range(2):  # the second time because the communicator stays failed
        with pytest.raises(HcclError) as caught:
            sum_of_ranks(me, comm)
        codes.append((caught.value.code, str(caught.value)))
    state = ctypes.c_int()
    me.hccl.GetCommAsyncError(comm, ctypes.byref(state))
    return codes, state.value


def test_dead_rank_is_named_and_the_communicator_stays_failed() -> None:
    outcomes = launch(_die_before_all_reduce, 3)
    assert outcomes[1].value is None
    for outcome in (outcomes[0], outcomes[2]):
        (first, again), state = outcome.value
        assert first[0] == again[0] == REMOTE
        assert state == 0  # the calls have told; an error here would make torch_npu end the process
        assert re.search(r"rank 1 \(pid \d+\) died during HcclAllReduce on communicator hccl_", first[1])
        assert "the communicator has failed: rank 1" in again[1]


def _die_while_joining(me: Rank) -> Any:
    if me.rank == 1:
        me.die()
    me.join()


def test_rank_that_never_joins_is_named_at_the_connect_deadline() -> None:
    outcomes = launch(_die_while_joining, 3, {"HCCL_CONNECT_TIMEOUT": "2"})
    assert outcomes[1].error is None
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is not None and outcome.error.startswith(f"[{TIMEOUT}]")
        assert "HCCL_CONNECT_TIMEOUT" in outcome.error and "rank 1 (has not joined)" in outcome.error


def _founder_dies(me: Rank) -> Any:
    if me.rank == 0:
        me.die()
    while _alive(me.info):
        time.sleep(0.01)
    me.join()


def _alive(info: bytes) -> bool:
    pid = int.from_bytes(info[16:20], "little")
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_dead_founder_is_an_error_not_a_wait() -> None:
    error = launch(_founder_dies, 2)[1].error
    assert error is not None
    assert re.search(r"the process that founded the communicator \(pid \d+\) is gone", error)


def _absent(me: Rank) -> Any:
    comm = me.join()
    if me.rank == 0:
        sum_of_ranks(me, comm)


def test_absent_rank_is_named_at_the_deadline() -> None:
    error = launch(_absent, 2, {"HCCL_EXEC_TIMEOUT": "2"})[0].error
    assert error is not None and error.startswith(f"[{TIMEOUT}]")
    assert re.search(r"not finished within 2 s \(HCCL_EXEC_TIMEOUT\); not arrived: rank 1 \(pid \d+\)", error)


def _left(me: Rank) -> Any:
    comm = me.join()
    if me.rank == 1:
        me.hccl.CommDestroy(comm)
    else:
        sum_of_ranks(me, comm)


def test_rank_that_destroyed_its_end_is_named() -> None:
    error = launch(_left, 2)[0].error
    assert error is not None and re.search(r"rank 1 \(pid \d+\) has destroyed its end", error)


def _mismatch(me: Rank, what: str) -> Any:
    comm = me.join()
    data = floats(*[7.0] * 8)
    mine = me.rank == 1
    try:
        if what == "operation" and mine:
            me.hccl.Barrier(comm, None)
        elif what == "root":
            me.hccl.Broadcast(data, 4, FP32, me.rank, comm, None)
        else:
            count = 5 if what == "count" and mine else 4
            kind = INT32 if what == "type" and mine else FP32
            op = 2 if what == "reduction" and mine else SUM
            me.hccl.AllReduce(data, data, count, kind, op, comm, None)
    finally:
        assert list(data) == [7.0] * 8, "data was touched"


def _mismatch_operation(me: Rank) -> Any:
    _mismatch(me, "operation")


def _mismatch_root(me: Rank) -> Any:
    _mismatch(me, "root")


def _mismatch_count(me: Rank) -> Any:
    _mismatch(me, "count")


def _mismatch_type(me: Rank) -> Any:
    _mismatch(me, "type")


def _mismatch_reduction(me: Rank) -> Any:
    _mismatch(me, "reduction")


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (_mismatch_operation, "the operation: HcclAllReduce on rank 0 .*HcclBarrier on rank 1"),
        (_mismatch_root, "the root rank: 0 on rank 0 .*1 on rank 1"),
        (_mismatch_count, "the count: 4 on rank 0 .*5 on rank 1"),
        (_mismatch_type, "the data type: fp32 on rank 0 .*int32 on rank 1"),
        (_mismatch_reduction, "the reduction: sum on rank 0 .*max on rank 1"),
    ],
)
def test_different_arguments_are_an_error_on_every_rank(work: Any, text: str) -> None:
    for error in errors(launch(work, 2)):
        assert error.startswith(f"[{PARA}] EI0005") and re.search(text, error), error


def _uneven_mismatch(me: Rank) -> Any:
    comm = me.join()
    send, receive, offsets = floats(*[1.0] * 6), floats(*[0.0] * 6), u64([0, 3])
    expected = u64([3, 2] if me.rank == 1 else [3, 3])
    me.hccl.AlltoAllV(send, u64([3, 3]), offsets, FP32, receive, expected, offsets, FP32, comm, None)


def test_uneven_all_to_all_names_the_pair_that_disagrees() -> None:
    for error in errors(launch(_uneven_mismatch, 2)):
        assert re.search(r"rank 1 \(pid \d+\) sends 3 elements to rank 1 .* expects 2", error)


def _messages(me: Rank) -> Any:
    """Long and short messages round a ring of ranks, in both directions at once, in order."""
    comm = me.join()
    after, before = (me.rank + 1) % me.ranks, (me.rank - 1) % me.ranks
    good = True
    for n in (0, 1, 1000, 300_000):
        sent = [(ctypes.c_int32 * n)(*[me.rank * 10 + k] * n) for k in range(2)]
        got = [(ctypes.c_int32 * n)() for _ in range(2)]
        me.hccl.GroupStart()
        for k in range(2):
            me.hccl.Send(sent[k], n, INT32, after, comm, None)
            me.hccl.Recv(got[k], n, INT32, before, comm, None)
        me.hccl.GroupEnd()
        good &= all(list(got[k]) == [before * 10 + k] * n for k in range(2))
    return good


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_in_a_group(ranks: int) -> None:
    assert values(launch(_messages, ranks)) == [True] * ranks


def _message_mismatch(me: Rank) -> Any:
    comm = me.join()
    data = floats(1, 2, 3, 4)
    if me.rank == 0:
        me.hccl.Send(data, 4, FP32, 1, comm, None)
        me.hccl.Recv(data, 4, FP32, 1, comm, None)
    else:
        me.hccl.Recv(data, 3, INT32, 0, comm, None)


def test_sender_and_receiver_that_disagree() -> None:
    for error in errors(launch(_message_mismatch, 2)):
        assert re.search(r"rank 0 \(pid \d+\) sends 4 x fp32, rank 1 \(pid \d+\) expects 3 x int32", error)


def _receive_from_the_dead(me: Rank) -> Any:
    comm = me.join()
    me.hccl.Barrier(comm, None)
    data = floats(1, 2)
    if me.rank == 1:
        me.hccl.Send(data, 2, FP32, 0, comm, None)
        me.die()
    me.hccl.Recv(data, 2, FP32, 1, comm, None)  # was sent before the end: arrives
    me.hccl.Recv(data, 2, FP32, 1, comm, None)


def test_receiving_from_a_dead_rank() -> None:
    error = launch(_receive_from_the_dead, 2)[0].error
    assert error is not None and re.search(r"rank 1 \(pid \d+\) died during HcclRecv", error)


def _sub_groups(me: Rank) -> Any:
    """Ranks 2 and 0, in that order, and rank 1 alone."""
    world = me.join()
    members = [1] if me.rank == 1 else [2, 0]
    sub = ctypes.c_void_p()
    ids = (ctypes.c_uint32 * len(members))(*members)
    mine = members.index(me.rank)
    me.hccl.CreateSubCommConfig(ctypes.byref(world), len(members), ids, 5, mine, None, ctypes.byref(sub))
    rank, size = ctypes.c_uint32(), ctypes.c_uint32()
    me.hccl.GetRankId(sub, ctypes.byref(rank))
    me.hccl.GetRankSize(sub, ctypes.byref(size))
    return rank.value, size.value, sum_of_ranks(me, sub), sum_of_ranks(me, world)


def test_sub_groups() -> None:
    assert values(launch(_sub_groups, 3)) == [
        (1, 2, [4.0, 40.0], [6.0, 60.0]),
        (0, 1, [2.0, 20.0], [6.0, 60.0]),
        (0, 2, [4.0, 40.0], [6.0, 60.0]),
    ]


def _wrong_size(me: Rank) -> Any:
    me.hccl.join(me.ranks + me.rank, me.info, me.rank)


def test_ranks_that_disagree_on_how_many_they_are() -> None:
    for error in errors(launch(_wrong_size, 2)):
        assert re.search(r"joins a communicator of \d ranks, others one of \d", error)


def test_bad_calls_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    hccl = Hccl()
    for arguments, code, text in [
        ((2, bytes(4108), 0), PARA, "was not made by HcclGetRootInfo"),
        ((2, hccl.root_info(), 2), PARA, "rank 2 does not exist among 2"),
        ((0, hccl.root_info(), 0), PARA, "1 to 1024 ranks, not 0"),
    ]:
        with pytest.raises(HcclError, match=re.escape(text)) as caught:
            hccl.join(*arguments)
        assert caught.value.code == code
    with pytest.raises(HcclError, match="does not exist"):
        hccl.Barrier(ctypes.c_void_p(1), None)
    with pytest.raises(HcclError, match="HcclCommInitAll is not supported") as caught:
        hccl.CommInitAll(1, None, None)
    assert caught.value.code == NOT_SUPPORT
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "soon")
    with pytest.raises(HcclError, match=r"HCCL_CONNECT_TIMEOUT must be a whole number of seconds.*'soon'"):
        hccl.join(1, hccl.root_info(), 0)


def _destroy_while_waiting(me: Rank) -> Any:
    comm = me.join()
    if me.rank == 0:
        threading.Timer(0.5, lambda: me.hccl.CommDestroy(comm)).start()
        sum_of_ranks(me, comm)


def test_destroying_ends_a_wait_of_another_thread() -> None:
    error = launch(_destroy_while_waiting, 2)[0].error
    assert error is not None and "the communicator was destroyed meanwhile" in error


def test_many_absent_ranks_are_not_all_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "1")
    hccl = Hccl()
    with pytest.raises(HcclError, match=r"rank 0 \(has not joined\).*and others") as caught:
        hccl.join(128, hccl.root_info(), 127)
    assert caught.value.code == TIMEOUT and "rank 100" not in str(caught.value)


def _maps() -> str:
    return Path("/proc/self/maps").read_text()


def _open_memory() -> int:
    """Open files of this process that are communicators' memory."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile by another thread
            found += "vnpu-hccl" in str(file.readlink())
    return found


def test_memory_has_no_name_in_the_file_system_and_is_given_back() -> None:
    hccl = Hccl()
    open_before = _open_memory()
    comm = hccl.join(1, hccl.root_info(), 0)
    ours = [line for line in _maps().splitlines() if "vnpu-hccl" in line]
    assert ours and all("/memfd:" in line for line in ours)
    assert _open_memory() == open_before
    hccl.CommDestroy(comm)
    assert "vnpu-hccl" not in _maps()


def test_counters() -> None:
    hccl = Hccl()
    ops = hccl.lib.vnpu_hccl_counters(None, 0)
    names = [hccl.lib.vnpu_hccl_counter_name(i).decode() for i in range(ops)]
    assert "HcclAllReduce" in names
    at = names.index("HcclAllReduce")

    def read() -> list[int]:
        values = (ctypes.c_uint64 * (3 * ops))()
        hccl.lib.vnpu_hccl_counters(values, ops)
        return list(values[3 * at : 3 * at + 2])

    calls, size = read()
    comm = hccl.join(1, hccl.root_info(), 0)
    data = floats(1, 2, 3)
    hccl.AllReduce(data, data, 3, FP32, SUM, comm, None)
    hccl.CommDestroy(comm)
    assert read() == [calls + 1, size + 12]
