"""CANN functions: written, allowed to do nothing, or failing by name. Nothing else."""

import ctypes
from pathlib import Path

import pytest
import torch
import torch_npu

from npufleet.kernels.virtual import boot, build, environment, stand_ins

from .process import attempt

ALLOWED = stand_ins.allowed(build.NATIVE / "allowed.txt")


@pytest.fixture(scope="module")
def folder() -> Path:
    state = environment.status()
    assert state.build is not None
    return state.build


@pytest.fixture(scope="module")
def wanted() -> set[str]:
    return stand_ins.needed_from_cann(Path(torch_npu.__file__).parent, Path(torch.__file__).parent)


def test_every_imported_name_is_answered(folder, wanted):
    assert len(wanted) > 150
    assert {"aclrtMalloc", "aclopCompileAndExecute", "rtKernelLaunch"} <= wanted
    assert not {name for name in wanted if name.startswith(("_ZNSt", "pthread_", "Py", "mem"))}
    assert wanted <= stand_ins.exported(folder / build.RUNTIME)


def test_the_sonames_hold_nothing_of_their_own(folder):
    for soname in stand_ins.SONAMES:
        assert not {
            name for name in stand_ins.exported(folder / soname) if name.startswith(("acl", "Hccl", "vnpu"))
        }
    assert not (folder / "libopapi.so").exists()


def test_a_generated_stand_in_fails_and_names_itself():
    text = stand_ins.source({"aclNew", "aclOld", "aclWritten"}, {"aclWritten"}, {"aclOld": "why"})
    assert 'int aclNew() { return vnpu_missing("aclNew"); }' in text
    assert "int aclOld() { return 0; }" in text
    assert "aclWritten" not in text


def test_every_allowed_name_has_a_reason():
    assert all(len(reason) > 10 for reason in ALLOWED.values())
    assert "aclopCompileAndExecute" not in ALLOWED
    assert not {name for name in ALLOWED if "Launch" in name or ("Execute" in name and "TimeOut" not in name)}


def test_an_unknown_function_reaches_the_user_by_name():
    done = attempt(
        "import torch; torch.ones(3, device='npu')", PYTORCH_NPU_ALLOC_CONF="expandable_segments:True"
    )
    assert done.returncode != 0
    assert "aclrtReserveMemAddress has no stand-in" in done.stderr


def test_operations_that_bypass_the_dispatcher_fail(folder):
    """torch_npu's own kernels end in aclopCompileAndExecute or libopapi; neither may look successful."""
    runtime = boot.runtime()
    runtime.aclopCompileAndExecute.argtypes = [
        ctypes.c_char_p, *[ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] * 2, ctypes.c_void_p,
        ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p,
    ]  # fmt: skip
    code = runtime.aclopCompileAndExecute(b"MatMulV2", 0, None, None, 0, None, None, None, 0, 0, None, None)
    assert code != 0
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    assert b"MatMulV2" in runtime.aclGetRecentErrMsg()
