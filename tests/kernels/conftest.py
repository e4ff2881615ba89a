"""The device of the kernel tests."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first NPU: a real one, or the virtual one of this environment."""
    return torch.device("npu:0")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20)
