"""Device memory is counted by torch_npu's own allocator, limited, and committed only when written."""

import pytest
import torch

from npufleet.kernels.virtual import counters

from .process import report

MIB = 1 << 20


def test_results_of_operations_count():
    torch.npu.synchronize()
    x = torch.ones(MIB, device="npu")
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    y = x + 1
    assert torch.npu.memory_allocated() - before >= 4 * MIB
    z = (y * 2).sum()
    assert torch.npu.max_memory_allocated() - before >= 8 * MIB
    del y, z
    assert torch.npu.memory_allocated() - before < MIB


def test_reserved_memory_and_free_memory_move():
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info()
    x = torch.empty(64 * MIB, dtype=torch.int8, device="npu")
    assert torch.npu.mem_get_info()[0] <= free - 64 * MIB
    del x
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info() == (free, total)


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "waits"),
    [(True, True, 0), (True, False, 1), (False, True, 1), (False, False, 1)],
)
def test_only_a_copy_into_pinned_memory_lets_the_host_go_on(pinned, non_blocking, waits):
    x = torch.arange(8, device="npu")
    host = torch.empty(8, dtype=torch.int64, pin_memory=pinned)
    assert host.is_pinned() == pinned
    counters.reset()
    host.copy_(x, non_blocking=non_blocking)
    assert counters.read().syncs["copy_to_host"] == waits
    torch.npu.synchronize()
    assert host.tolist() == list(range(8))


@pytest.mark.parametrize(("non_blocking", "waits"), [(True, 0), (False, 1)])
def test_a_tensor_brought_to_the_host_makes_it_wait_unless_told_not_to(non_blocking, waits):
    x = torch.arange(8, device="npu")
    counters.reset()
    host = x.to("cpu", non_blocking=non_blocking)
    assert counters.read().syncs["copy_to_host"] == waits
    torch.npu.synchronize()
    assert host.tolist() == list(range(8))


def test_host_results_take_no_device_memory():
    x = torch.ones(MIB, device="npu")
    before = torch.npu.memory_allocated()
    host = x.cpu()
    assert host.sum().item() == MIB
    assert torch.npu.memory_allocated() == before


SMALL = """
import json, torch
kept = torch.zeros(400 << 20, dtype=torch.int8, device="npu")
seen = []
for attempt in (lambda: torch.empty(200 << 20, dtype=torch.int8, device="npu"), lambda: kept + kept):
    try:
        attempt()
    except torch.OutOfMemoryError as error:
        seen.append(str(error))
del kept
torch.npu.empty_cache()
later = torch.empty(300 << 20, dtype=torch.int8, device="npu").numel()
print(json.dumps({"seen": seen, "later": later, "total": torch.npu.mem_get_info()[1]}))
"""


def test_running_out_of_hbm_is_torch_s_own_error_and_can_be_survived():
    facts = report(SMALL, NPUFLEET_DEVICE="virtual:1,hbm=512MiB")
    assert len(facts["seen"]) == 2
    assert all("out of memory" in text for text in facts["seen"])
    assert facts["later"] == 300 << 20
    assert facts["total"] == 512 << 20


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_zeroed_cache_larger_than_needed_commits_nothing():
    before = resident()
    cache = torch.zeros(2048 * MIB, dtype=torch.int8, device="npu")
    assert resident() - before < 64 * MIB
    assert cache[::MIB].sum().item() == 0
    cache[: 8 * MIB] = 3
    cache[1 : 8 * MIB].zero_()
    assert cache[: 9 * MIB].sum().item() == 3


def test_streams_and_events_keep_time():
    stream = torch.npu.Stream()
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with torch.npu.stream(stream):
        start.record()
        x = torch.ones(256, 256, device="npu") @ torch.ones(256, 256, device="npu")
        end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0
    assert stream.query()
    assert x.sum().item() == 256**3


def test_raw_copies_check_their_bounds():
    with pytest.raises(RuntimeError):
        torch.npu.set_device(99)
