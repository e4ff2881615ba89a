"""The model runner: one step, from what the scheduler chose to sampled tokens."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.workspace import lock_workspace

from .graph import ACLGraphWrapper
from .loader import checked
from .moe.shared_linear import check_claimed
from .sampler import NPUTopKTopPSampler

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


class NPUModelRunner(GPUModelRunner):
    """vLLM's first model runner with ACL graphs, the NPU's sampler and the zeroing of our KV pages."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if not self.is_pooling_model:
            inner = self.sampler.topk_topp_sampler
            self.sampler.topk_topp_sampler = NPUTopKTopPSampler(
                inner.logprobs_mode, inner.use_fp64_gumbel, self._largest_top_k
            )
        self._pages_to_zero: list[torch.Tensor] = []
        # Where tokens are spread over tensor-parallel ranks, some of vLLM's models tell a rank's part of a step from
        # the whole by its rows. The part of one token is one row, so they would take padding for the token
        # (vllm/model_executor/models/deepseek_v2.py; vLLM's issue 50154 and pull request 50691).
        self._smallest_step = 2 if self.parallel_config.use_sequence_parallel_moe else 1

    def _largest_top_k(self, requests: int) -> int:
        """The largest top-k of the running batch, read on the host; the vocabulary size if the logits are not
        one row for each of its requests, as in a warm-up.
        """
        if requests != self.input_batch.num_reqs:
            return self.input_batch.vocab_size
        return int(self.input_batch.top_k_cpu[:requests].max())

    def load_model(self, load_dummy_weights: bool = False, *, model: nn.Module | None = None) -> None:
        """Load the weights; wrap the model so that decode steps are captured and replayed.

        :raises ValueError: weights that the checkpoint lacks.
        """
        self.load_config = checked(self.load_config)
        super().load_model(load_dummy_weights, model=model)
        check_claimed(self.get_model())
        wrapped: Any = self.model
        if type(wrapped) is CUDAGraphWrapper:
            self.model = ACLGraphWrapper(wrapped.unwrap(), self.vllm_config, wrapped.runtime_mode)

    def _determine_batch_execution_and_padding(  # type: ignore[override]  # vLLM names the arguments
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: np.ndarray,
        max_num_scheduled_tokens: int,
        *,
        force_uniform_decode: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As vLLM's, with steps of at least ``_smallest_step`` tokens; a padded decode step stays one."""
        if num_tokens < self._smallest_step:
            force_uniform_decode = self._is_uniform_decode(
                max_num_scheduled_tokens=max_num_scheduled_tokens,
                uniform_decode_query_len=self.uniform_decode_query_len,
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                force_uniform_decode=force_uniform_decode,
            )
            num_tokens = self._smallest_step
        return super()._determine_batch_execution_and_padding(
            num_tokens,
            num_reqs,
            num_scheduled_tokens_np,
            max_num_scheduled_tokens,
            force_uniform_decode=force_uniform_decode,
            **kwargs,
        )

    @contextmanager
    def synchronize_input_prep(self) -> Iterator[None]:
        """As vLLM's: what the step before may still copy from is not written. But the host waits only if the NPU has
        not copied it yet. Copies are the first thing that a step does, and the one before it had ended when its tokens
        came.
        """
        event = self.prepare_inputs_event
        if event is None:  # steps are not scheduled ahead
            yield
            return
        if not event.query():
            event.synchronize()
        try:
            yield
        finally:
            event.record()

    @torch.inference_mode()
    def capture_model(self) -> int:
        """Capture a graph for each batch size, the largest first so that the others share its memory.

        Returns the bytes of device memory that the graphs took. vLLM's own version switches streams and
        groups through CUDA classes.
        """
        if self.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
            return 0
        start = time.perf_counter()
        gc.collect()
        torch.npu.empty_cache()
        free = torch.npu.mem_get_info()[0]
        stream = torch.npu.Stream(self.device)
        stream.wait_stream(torch.npu.current_stream())
        set_cudagraph_capturing_enabled(True)
        try:
            with self._freeze_gc(), torch.npu.stream(stream):
                for mode, descriptors in self.cudagraph_dispatcher.get_capture_descs():
                    taken = [step for step in descriptors if step.num_tokens >= self._smallest_step]
                    if taken:
                        self._capture_cudagraphs(taken, mode)
        finally:
            set_cudagraph_capturing_enabled(False)
        torch.npu.current_stream().wait_stream(stream)
        torch.npu.synchronize()
        torch.npu.empty_cache()
        lock_workspace()
        used = max(free - torch.npu.mem_get_info()[0], 0)
        logger.info_once(
            "Captured decode graphs in %.1f s, %.2f GiB.", time.perf_counter() - start, used / (1 << 30)
        )
        return used

    def _init_kv_zero_meta(self) -> None:
        """Collect one view [blocks, bytes of a page] per layer, for :meth:`_zero_block_ids`."""
        seen: set[int] = set()
        for group in self._kv_cache_spec_attn_group_iterator():
            if not isinstance(group.kv_cache_spec, AttentionSpec):
                continue
            for name in group.layer_names:
                cache = self.compilation_config.static_forward_context[name].kv_cache
                if not isinstance(cache, torch.Tensor) or cache.data_ptr() in seen:
                    continue
                seen.add(cache.data_ptr())
                blocks = self.kv_cache_config.num_blocks
                self._pages_to_zero.append(cache.unflatten(0, (blocks, -1)))

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Zero the pages of newly allocated blocks. vLLM's version is a Triton kernel over raw addresses."""
        if not block_ids or not self._pages_to_zero:
            return
        index = async_tensor_h2d(block_ids, device=self.device, dtype=torch.int64)
        for pages in self._pages_to_zero:
            pages.index_fill_(0, index, 0)
