"""Storage formats of the virtual NPU: a cast keeps elements and marks the memory, where torch_npu allows it."""

from collections.abc import Iterator

import pytest
import torch
import torch_npu

from npufleet.kernels.virtual import formats

ND, NZ = 2, 29


@pytest.fixture
def allowed() -> Iterator[None]:
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


def weight() -> torch.Tensor:
    return torch.arange(32 * 48, dtype=torch.float32).view(32, 48).to("npu:0", torch.bfloat16)


def format_of(tensor: torch.Tensor) -> int | None:
    return formats.find(tensor.untyped_storage().data_ptr())


def test_a_cast_keeps_what_the_tensor_holds(allowed):
    before = weight()
    cast = torch_npu.npu_format_cast(before, NZ)
    assert format_of(cast) == int(torch_npu.get_npu_format(cast)) == NZ
    assert format_of(before) == ND and cast.data_ptr() != before.data_ptr()
    x = torch.ones(2, 32, device="npu:0", dtype=torch.bfloat16)
    assert torch.equal(cast, before) and torch.equal(x @ cast, x @ before)
    parameter = torch.nn.Parameter(cast, requires_grad=False)
    assert format_of(parameter) == NZ and format_of(torch_npu.npu_format_cast(cast, ND)) == ND
    cast.copy_(before * 2)
    assert format_of(cast) == NZ and torch.equal(parameter, before * 2)


def test_torch_npu_decides_whether_there_are_other_formats_than_nd():
    torch.npu.config.allow_internal_format = False
    cast = torch_npu.npu_format_cast(weight(), NZ)
    assert format_of(cast) == int(torch_npu.get_npu_format(cast)) == ND


def test_memory_that_is_used_again_is_nd(allowed):
    cast = torch_npu.npu_format_cast(weight(), NZ)
    address = cast.untyped_storage().data_ptr()
    del cast
    again = weight()
    if again.untyped_storage().data_ptr() == address:
        assert format_of(again) == ND
    assert formats.find(address) == ND


def test_host_memory_has_no_format():
    assert format_of(torch.zeros(3)) is None


def test_other_formats_are_refused(allowed):
    with pytest.raises(NotImplementedError, match="format 4, only ND"):
        torch_npu.npu_format_cast(weight(), 4)
    with pytest.raises(RuntimeError, match="not contiguous"):
        torch_npu.npu_format_cast(weight().t(), NZ)
