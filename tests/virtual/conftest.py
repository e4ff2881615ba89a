"""Tests of the virtual NPU run where this environment has one."""

import pytest

from npufleet.kernels.virtual import environment


@pytest.fixture(autouse=True, scope="session")
def virtual_npu() -> None:
    """Skip where the virtual NPU was not enabled (a host with real CANN, for one)."""
    if not environment.status().enabled:
        pytest.skip("the virtual NPU is not enabled in this environment")
