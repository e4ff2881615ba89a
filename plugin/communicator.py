"""Collectives of one parallel group over HCCL, through ``torch.distributed``."""

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.base_device_communicator import (
    All2AllManagerBase,
    DeviceCommunicatorBase,
)


class NPUCommunicator(DeviceCommunicatorBase):
    """vLLM's device communicator of one group: the base class's collectives, run by the ``hccl`` backend.

    The group coordinator hands down ``npu:<local rank>``, which is another engine's NPU where an engine was
    given its devices by number; the device that the worker made current is the right one.
    """

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        current = torch.device("npu", torch.npu.current_device())
        super().__init__(cpu_group, current, device_group, unique_name, use_all2all=use_all2all)
        if self.use_all2all:
            # It moves nothing: tokens go to experts as plugin/moe/communication says. vLLM asks it whether a lost
            # rank can be survived, and the base class answers no.
            self.all2all_manager = All2AllManagerBase(cpu_group)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors, all of one shape, along ``dim``; HCCL takes contiguous ones."""
        return super().all_gather(input_.contiguous(), dim)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """The concatenation along ``dim`` on rank ``dst`` of the group, None elsewhere.

        HCCL has no gather; a gathered tensor on every rank costs the same time on a full mesh.
        """
        gathered = self.all_gather(input_, dim)
        return gathered if self.rank_in_group == dst else None
