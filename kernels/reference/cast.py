"""References of small operators that torch_npu itself sends through the dispatcher."""

import torch

from .registry import reference


@reference("npu::_npu_dtype_cast")
def _npu_dtype_cast(self: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``self`` in another dtype: a new tensor, also when the dtype is the same."""
    return self.to(dtype, copy=True)
