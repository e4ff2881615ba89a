"""vLLM's own scheduler and KV-cache manager over a device-time model.

Everything up to the device is the real thing: admission, chunking, preemption, prefix blocks and their hashes,
KV events, stop conditions, statistics. Only the model is missing: a step takes as long as the device-time model
says, and tokens are drawn from the request's id.

Import this in a process that is set up as a gateway's is (``gateway/process.py``): vLLM on its CPU platform.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from npufleet.cluster.router.base import LoadReport
from npufleet.cluster.sim.base import Core, Outcome, SimRequest, Step
from npufleet.cluster.sim.timing import DeviceTime


def engine_config(
    model: Path,
    device: DeviceTime,
    block_size: int,
    *,
    max_model_len: int,
    name: str = "sim",
    events: KVEventsConfig | None = None,
) -> VllmConfig:
    """The configuration of an engine on ``device``, with the tokenizer and architecture of folder ``model``."""
    model_config = ModelConfig(
        model=str(model), tokenizer=str(model), max_model_len=max_model_len, served_model_name=[name]
    )
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = device.kv_tokens // block_size
    return VllmConfig(
        model_config=model_config,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=device.max_batched_tokens,
            max_num_seqs=device.max_seqs,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_events_config=events,
    )


def make_scheduler(config: VllmConfig) -> Scheduler:
    """vLLM's scheduler for one full-attention model; the shapes of keys and values do not matter to it."""
    cache = config.cache_config
    assert cache.num_gpu_blocks is not None
    spec = FullAttentionSpec(block_size=cache.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv_cache = KVCacheConfig(
        num_blocks=cache.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=cache.block_size,
        log_stats=True,
    )


class SchedulerCore(Core):
    """The real scheduler, step by step."""

    def __init__(self, config: VllmConfig, device: DeviceTime) -> None:
        self.config = config
        self.scheduler = make_scheduler(config)
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(config.cache_config.block_size, hash_function)
        self.outputs: list[EngineCoreOutputs] = []  # of the last step
        self._device = device
        self._vocabulary = config.model_config.get_vocab_size()
        self._scheduled: SchedulerOutput | None = None
        self._first: set[str] = set()

    def add(self, request: SimRequest) -> None:
        """Queue a request of token ids; it ends by its length alone."""
        params = SamplingParams(
            max_tokens=request.output_tokens, min_tokens=request.output_tokens, ignore_eos=True
        )
        params.update_from_generation_config({}, None)
        self.take(
            Request(
                request_id=request.request_id,
                prompt_token_ids=list(request.token_ids),
                sampling_params=params,
                pooling_params=None,
                block_hasher=self.hasher,
            )
        )

    def take(self, request: Request) -> None:
        """Queue a request of vLLM's."""
        self._first.add(request.request_id)
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """Give it up."""
        self._first.discard(request_id)
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_requests()

    def load(self) -> LoadReport:
        """Queue and cache now."""
        running, waiting = self.scheduler.get_request_counts()
        queued = sum(request.num_tokens for request in self.scheduler.waiting)
        return LoadReport(
            running=running,
            waiting=waiting,
            waiting_tokens=queued,
            kv_usage=self.scheduler.get_kv_cache_usage(),
        )

    def begin(self) -> Step:
        """Schedule a step."""
        assert self._scheduled is None, "a step is under way"
        self._scheduled = scheduled = self.scheduler.schedule()
        prompt = decodes = context = 0
        pairs = 0.0
        for request_id, count in scheduled.num_scheduled_tokens.items():
            after = self.scheduler.requests[request_id].num_computed_tokens
            before = after - count
            if request_id in self._first or count > 1:
                prompt += count
                pairs += count * (before + (count + 1) / 2)
            else:
                decodes += 1
                context += after
        if not prompt and not decodes:
            return Step(1, 0.0)  # it only clears away what was aborted
        return Step(1, self._device.step(prompt, pairs, decodes, context))

    def end(self, count: int) -> Outcome:
        """The step is done; ``outputs`` has what vLLM's frontend gets of it."""
        scheduled, self._scheduled = self._scheduled, None
        assert scheduled is not None and count == 1
        ids = list(scheduled.num_scheduled_tokens)
        tokens = [self._sample(request_id) for request_id in ids]
        result = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={one: at for at, one in enumerate(ids)}, sampled_token_ids=tokens
        )
        preempted = len(scheduled.preempted_req_ids or ())
        self.outputs = list(self.scheduler.update_from_output(scheduled, result).values())
        news = [output for batch in self.outputs for output in batch.outputs]
        started = [
            (one.request_id, one.prefill_stats.num_cached_tokens if one.prefill_stats else 0)
            for one in news
            if one.request_id in self._first and one.new_token_ids
        ]
        self._first.difference_update(one for one, _ in started)
        finished = [one.request_id for one in news if one.finished]
        return Outcome(started=started, finished=finished, preempted=preempted)

    def close(self) -> None:
        """Stop publishing events."""
        self.scheduler.shutdown()

    def _sample(self, request_id: str) -> list[int]:
        """A token, where all tokens before it are computed; the same request always gets the same ones."""
        request: Any = self.scheduler.requests.get(request_id)
        if request is None or request.num_computed_tokens < request.num_tokens:
            return []
        return [hash((request.num_prompt_tokens, request.num_output_tokens)) % self._vocabulary]
