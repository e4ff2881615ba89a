"""From VllmEngine GenerateResponse messages back to vLLM's EngineCoreOutput.

A stream chunk carries no finish flag, but vLLM's output processor must know that a token is the last one
*before* it makes text of it (a stop token has no text). So a chunk that may be the last is held back until
the next message: if that is the ``complete`` message, both become one output. In a stream, ``complete``
repeats the last ids: they are not read. In an answer of one piece, ``complete`` has everything.
"""

from __future__ import annotations

import json
import time
from array import array
from typing import Any

from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats

from ..router.replay.ends import Finish
from .logprobs import output_logprobs, prompt_logprobs
from .shortcut import Shortcut

_FINISH = {str(reason): reason for reason in FinishReason}


class ResponseReader:
    """Turns the messages of one call into outputs, in order."""

    def __init__(
        self, request: EngineCoreRequest, *, stream: bool, ranked: bool, max_model_len: int, said: int = 0
    ) -> None:
        """``said``: tokens of the answer that another engine gave before this call."""
        params = request.sampling_params
        assert params is not None and request.prompt_token_ids is not None
        self._id = request.request_id
        self._stream = stream
        self._ranked = ranked
        self._stop_ids = params.all_stop_token_ids
        room = max_model_len - len(request.prompt_token_ids)
        self._last_count = (room if params.max_tokens is None else min(room, params.max_tokens)) - said
        self._wanted = params.num_logprobs
        self._wanted_prompt = params.prompt_logprobs
        self._queued_at = time.monotonic()
        self._sent_at = self._queued_at
        self._held: EngineCoreOutput | None = None
        self._said = said
        self._first = not said
        self._empty = False  # a message came without tokens, after the first ones
        self.ids = array("I")  # read so far

    @property
    def tokens(self) -> int:
        """How many were read so far."""
        return len(self.ids)

    def cut(self, finish: Finish | None, into: list[EngineCoreOutput]) -> bool:
        """The stream broke here: append what was held back, as the answer's end where ``finish`` says that it is."""
        output, self._held = self._held, None
        if finish is not None:
            output = output or EngineCoreOutput(self._id, [])
            output.finish_reason = _FINISH[finish.reason]
            output.stop_reason = finish.token
        if output is not None:
            into.append(output)
        return finish is not None

    def sent(self) -> None:
        """The request goes to an engine now: what was before counts as time in the queue."""
        self._sent_at = time.monotonic()

    def shorten(self, response: Any, shortcut: Shortcut) -> bool:
        """Hand the tokens of one message to ``shortcut``; False where the message must be fed."""
        if self._empty:
            shortcut.close()  # the count of tokens does not tell when an output without any has passed
        elif (
            self._held is None and shortcut.is_open(self._said + len(self.ids)) and response.HasField("chunk")
        ):
            ids = response.chunk.token_ids
            if ids and ids[-1] not in self._stop_ids and len(self.ids) + len(ids) < self._last_count:
                self.ids.extend(ids)
                shortcut.put(ids)
                return True
        shortcut.flush()  # nothing overtakes it
        return False

    def feed(self, response: Any, into: list[EngineCoreOutput]) -> bool:
        """Append the outputs that follow from one message; True when it was the last one."""
        if response.WhichOneof("response") == "complete":
            into.append(self._complete(response.complete))
            return True
        chunk = response.chunk
        if self._held is not None:
            into.append(self._held)
            self._held = None
        first = not (self._said or self.ids)
        output = self._output(list(chunk.token_ids), chunk)
        ids = output.new_token_ids
        self._empty = self._empty or not (ids or first)
        if ids and (ids[-1] in self._stop_ids or self.tokens >= self._last_count):
            self._held = output
        else:
            into.append(output)
        return False

    def _complete(self, complete: Any) -> EngineCoreOutput:
        output = self._held
        self._held = None
        if output is None:
            ids = [] if self._stream and not self._first else list(complete.output_ids)
            output = self._output(ids, complete) if ids or self._first else EngineCoreOutput(self._id, [])
        output.finish_reason = _FINISH.get(complete.finish_reason, FinishReason.ERROR)
        stopped_by = complete.WhichOneof("matched_stop")
        if stopped_by is not None:
            output.stop_reason = getattr(complete, stopped_by)
        if complete.kv_transfer_params_json:
            output.kv_transfer_params = json.loads(complete.kv_transfer_params_json)
        return output

    def _output(self, ids: list[int], message: Any) -> EngineCoreOutput:
        """``message``: a chunk or a complete; both name their members alike."""
        self.ids.extend(ids)
        output = EngineCoreOutput(self._id, ids)
        if self._wanted is not None and ids:
            output.new_logprobs = output_logprobs(message.output_logprobs, self._wanted, self._ranked)
        if self._first:
            self._first = False
            self._prefill(output, message)
        return output

    def _prefill(self, output: EngineCoreOutput, message: Any) -> None:
        if self._wanted_prompt is not None:
            output.new_prompt_logprobs_tensors = prompt_logprobs(
                message.input_logprobs, self._wanted_prompt, self._ranked
            )
        stats = PrefillStats()
        cached = min(message.cached_tokens, message.prompt_tokens)
        stats.set(message.prompt_tokens, num_local_cached_tokens=cached, num_external_cached_tokens=0)
        output.prefill_stats = stats
        # The engine's own queue is not told; to the frontend "queued" is the wait for an engine.
        output.events = [
            EngineCoreEvent(EngineCoreEventType.QUEUED, self._queued_at),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, self._sent_at),
        ]
