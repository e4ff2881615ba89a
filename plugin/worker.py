"""The worker: one process, one NPU."""

import atexit
import gc
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.utils.gc_utils import freeze_gc_heap, maybe_attach_gc_debug_callback
from vllm.utils.mem_utils import MemorySnapshot
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.worker_base import CompilationTimes

from .moe.communication import group as mc2_group
from .overrides import apply_overrides

if TYPE_CHECKING:
    from .model_runner import NPUModelRunner

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


def _leave_groups() -> None:
    """Destroy vLLM's process groups in this process, then torch's; nothing is left for a second call."""
    mc2_group.forget()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


class NPUWorker(Worker):
    """vLLM's worker on an NPU."""

    model_runner: "NPUModelRunner"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments as vLLM's worker."""
        # A launcher on another host may have started this process without the driver's choice of runner.
        current_platform.pre_register_and_update()
        super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        """Open this rank's NPU, join the process groups, measure memory and build the model runner.

        :raises ValueError: fewer visible NPUs than ranks on this host, or a dtype that NPUs do not compute.
        """
        self.device = torch.device("npu", self._visible_device())
        torch.npu.set_device(self.device)
        assert isinstance(self.model_config.dtype, torch.dtype)
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        apply_overrides()
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        # torch_npu destroys all groups when the interpreter exits, and vLLM would then find its own gone.
        # Leaving first, which is what registering last means, keeps both in order.
        atexit.register(_leave_groups)
        self._tell_groups_the_device()
        mc2_group.open_group(self.vllm_config)
        set_random_seed(self.model_config.seed)
        gc.collect()
        torch.npu.empty_cache()
        # After the groups exist, so that their buffers count as used.
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        self._init_workspace_and_model_runner()

    def _visible_device(self) -> int:
        """The index of this rank's NPU among those that the process sees.

        With data parallelism on one host each replica's ranks come behind those of the replicas before it,
        unless the launcher assigned each replica its own devices or started the ranks itself.
        """
        parallel = self.parallel_config
        assigned, visible = parallel.assigned_physical_gpu_ids, torch.npu.device_count()
        launched = parallel.distributed_executor_backend in ("ray", "external_launcher")
        launched = launched or (assigned is not None and len(assigned) <= parallel.world_size)
        if not launched and parallel.data_parallel_backend != "ray" and parallel.nnodes_within_dp == 1:
            replica = parallel.data_parallel_rank_local
            if replica is None:
                replica = parallel.data_parallel_index
            self.local_rank += replica * parallel.world_size
        if assigned is not None:
            assigned = self._planned(assigned)
            set_assigned_physical_gpu_ids(assigned)
        if self.local_rank >= (visible if assigned is None else len(assigned)):
            raise ValueError(
                f"rank {self.rank} needs NPU {self.local_rank} of this host but it has {visible} visible "
                f"(assigned: {assigned}); lower tensor_parallel_size, pipeline_parallel_size or "
                f"data_parallel_size, or widen {current_platform.device_control_env_var}"
            )
        return current_platform.logical_device_id_to_visible_device_id(self.local_rank)

    def _planned(self, assigned: list[int]) -> list[int]:
        """The NPUs of this host's ranks: those that ``additional_config["npus"]`` plans for each rank, else those
        that the launcher assigned.
        """
        settings = self.vllm_config.additional_config
        planned = settings.get("npus") if isinstance(settings, dict) else None
        first = self.rank - self.local_rank
        return assigned if planned is None else list(planned[first : first + len(assigned)])

    def _tell_groups_the_device(self) -> None:
        """Correct the groups' idea of the device: ``npu:<local rank>`` whatever devices the launcher
        assigned.
        """
        for reference in parallel_state._groups.values():
            group = reference()
            if group is not None:
                assert self.device is not None
                group.device = self.device

    def _make_model_runner(self) -> "NPUModelRunner":
        from .model_runner import NPUModelRunner

        assert self.device is not None
        return NPUModelRunner(self.vllm_config, self.device)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        """No pool: sleep mode, which frees memory by tag, is not available."""
        return nullcontext()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Capture the decode graphs and run the sampler once at its largest, so that serving allocates
        nothing new.

        Nothing is compiled, so both compilation times are zero.
        """
        runner = self.model_runner
        runner.maybe_remove_all_loras(runner.lora_config)
        if not self.model_config.enforce_eager:
            runner.capture_model()
        if parallel_state.get_pp_group().is_last_rank:
            scheduler = self.scheduler_config
            requests = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
            hidden, last_hidden = runner._dummy_run(
                num_tokens=requests, skip_eplb=True, cudagraph_runtime_mode=CUDAGraphMode.NONE
            )
            if runner.is_pooling_model:
                runner._dummy_pooler_run(hidden)
            else:
                runner._dummy_sampler_run(hidden_states=last_hidden)
        # Serving starts from the same random state however the engine was warmed up.
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)
        freeze_gc_heap()
        maybe_attach_gc_debug_callback()
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def shutdown(self) -> None:
        """Release the model, the cache and the graphs, and give their memory back to the device."""
        super().shutdown()
        torch.npu.empty_cache()
