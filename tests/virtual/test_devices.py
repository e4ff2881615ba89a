"""Devices as torch.npu reports them: how many, which chip, which properties."""

import pytest

from .process import report

FACTS = """
import json, torch, torch_npu
p = torch.npu.get_device_properties(0)
print(json.dumps({
    "count": torch.npu.device_count(), "name": torch.npu.get_device_name(0),
    "soc": torch_npu.npu.get_soc_version(),
    "cube": p.cube_core_num, "vector": p.vector_core_num, "l2": p.L2_cache_size, "memory": p.total_memory,
    "free": torch.npu.mem_get_info()[0]}))
"""


@pytest.mark.parametrize(
    ("setting", "count", "name", "soc", "cube", "gib"),
    [
        ("virtual:8:Ascend910B3", 8, "Ascend910B3", 223, 20, 64),
        ("virtual:2:Ascend910B1,hbm=16GiB", 2, "Ascend910B1", 220, 24, 16),
        ("virtual:16:Ascend910_9391", 16, "Ascend910_9391", 250, 24, 64),
    ],
)
def test_the_chip_is_the_one_that_was_asked_for(setting, count, name, soc, cube, gib):
    facts = report(FACTS, NPUFLEET_DEVICE=setting, ASCEND_RT_VISIBLE_DEVICES=None)
    assert facts["count"] == count
    assert (facts["name"], facts["soc"]) == (name, soc)
    assert (facts["cube"], facts["vector"]) == (cube, 2 * cube)
    assert facts["memory"] == gib << 30
    assert facts["l2"] == 192 << 20
    assert 0 < facts["free"] <= gib << 30


VISIBLE = """
import ctypes, json, os, torch
from npufleet.kernels.virtual import boot
counts, count = [], ctypes.c_uint32()
for value in {values!r}:
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = value
    assert boot.runtime().aclrtGetDeviceCount(ctypes.byref(count)) == 0
    counts.append(count.value)
os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "5,2"
torch.npu.set_device(1)
os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "0,1,2,3"
try:
    torch.npu.set_device(2)
    error = ""
except Exception as e:
    error = str(e)
assert boot.runtime().aclrtGetDeviceCount(ctypes.byref(count)) == 0
print(json.dumps({{"counts": counts, "after": count.value, "error": error,
                   "id": str(torch.npu.get_device_properties(1).uuid)}}))
"""


def test_visible_devices_end_at_the_first_that_is_none_and_are_fixed_by_first_use():
    values = ["0,1,2", "3", "", "1,9,2", "x", "2,2", "4, 5"]
    facts = report(VISIBLE.format(values=values), NPUFLEET_DEVICE="virtual:8", ASCEND_RT_VISIBLE_DEVICES="0")
    assert facts["counts"] == [3, 1, 0, 1, 0, 1, 2]
    assert facts["after"] == 2
    assert facts["error"]
    assert bytes.fromhex(facts["id"].replace("-", "")).rstrip(b"\0").endswith(b"-02")  # physical device 2
