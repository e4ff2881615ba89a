"""An AsyncLLM as the engine's service uses it, without a model: it records calls and plays scripted
outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from vllm.inputs.engine import tokens_input
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError


class FakeAsyncLLM:
    """Answers with token ids 10, 11, ... up to max_tokens; ``error`` is raised at ``error_at`` tokens
    instead."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.errored = False
        self.error: Exception | None = None
        self.error_at = 0
        self.gate: asyncio.Event | None = None  # awaited before the second token
        self.cancelled = asyncio.Event()
        self.model_config = SimpleNamespace(
            max_logprobs=20, tokenizer="", max_model_len=64, served_model_name="fake", model="fake"
        )
        self.vllm_config = SimpleNamespace(
            model_config=self.model_config, parallel_config=SimpleNamespace(data_parallel_size=1)
        )
        self.renderer = SimpleNamespace(process_for_engine=self._process)

    @staticmethod
    def _process(prompt: dict[str, Any], arrival_time: float) -> Any:
        return tokens_input(prompt["prompt_token_ids"])

    async def check_health(self) -> None:
        if self.errored:
            raise EngineDeadError()

    async def collective_rpc(self, method: str) -> list[None]:
        """Answers as workers that are well."""
        if self.errored:
            raise EngineDeadError()
        return [None]

    async def abort(self, request_ids: Any) -> None:
        self.aborted += list(request_ids)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **more: Any
    ) -> AsyncIterator[RequestOutput]:
        self.calls.append({"prompt": prompt, "params": sampling_params, "request_id": request_id, **more})
        count = sampling_params.max_tokens or 3
        ids: list[int] = []
        try:
            for index in range(count):
                if self.error is not None and index == self.error_at:
                    raise self.error
                if index == 1 and self.gate is not None:
                    await self.gate.wait()
                ids.append(10 + index)
                last = index == count - 1
                if sampling_params.output_kind is RequestOutputKind.DELTA:
                    yield self._output(request_id, ids[-1:], last, sampling_params)
                elif last:
                    yield self._output(request_id, ids, True, sampling_params)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    @staticmethod
    def _output(request_id: str, ids: list[int], finished: bool, params: SamplingParams) -> RequestOutput:
        logprobs = None
        if params.logprobs is not None:
            logprobs = [
                {token: Logprob(-2.0, 7, None), 1: Logprob(-0.5, 1, None), 2: Logprob(-1.0, 2, None)}
                for token in ids
            ]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, {2: Logprob(-3.0, 9, None), 5: Logprob(-0.5, 1, None)}]
        completion = CompletionOutput(
            index=0,
            text="",
            token_ids=list(ids),
            cumulative_logprob=None,
            logprobs=logprobs,
            finish_reason="length" if finished else None,
        )
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=[1, 2],
            prompt_logprobs=prompt_logprobs,
            outputs=[completion],
            finished=finished,
            num_cached_tokens=0,
        )
