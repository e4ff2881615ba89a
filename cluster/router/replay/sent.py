"""What a client has of a streamed answer, and how the rest of it from another engine is told.

Of an answer's messages, as vLLM's servicer makes them, token ids, log probabilities and ``completion_tokens`` count
from the message before; ``prompt_tokens`` and ``cached_tokens`` are the same in each. So of the messages of the next
engine, for which the tokens already sent are part of the prompt, only these two need another value.
"""

from __future__ import annotations

from array import array

from google.protobuf.message import DecodeError
from smg_grpc_proto import vllm_engine_pb2 as pb

from npufleet.cluster.router.replay.ends import Finish

_SETTLED_AT = 64  # messages that are kept as they are before their tokens are taken out of them


class Sent:
    """Messages of one answer with one choice."""

    def __init__(self) -> None:
        self.readable = True  # each message so far was one
        self._whole = False
        self._tokens = array("I")
        self._raw: list[bytes] = []
        self._last = b""  # the last chunk
        self._prompt_tokens = self._cached_tokens = 0  # as the first message told them
        self._seam = -1  # tokens before the part that comes now; -1: it is the first one

    @property
    def whole(self) -> bool:
        """The last message came."""
        self._settle()
        return self._whole

    @property
    def tokens(self) -> array[int]:
        """The ids of all tokens sent."""
        self._settle()
        return self._tokens

    def take(self, raw: bytes) -> bytes:
        """An engine's next message, as it goes to the client."""
        if self._seam >= 0:
            raw = self._fitted(raw)
        self._raw.append(raw)
        if len(self._raw) >= _SETTLED_AT:
            self._settle()
        return raw

    def broke(self) -> None:
        """The stream broke here; what comes next is another engine's."""
        self._settle()
        self._seam = len(self._tokens)

    def ending(self, finish: Finish) -> bytes:
        """The message that was to come after the last one sent, which ended the answer by ``finish``."""
        told = _parsed(self._last)
        last = pb.GenerateStreamChunk() if told is None else told.chunk
        done = pb.GenerateComplete(
            output_ids=last.token_ids,  # a stream's last message repeats the tokens of the one before
            finish_reason=finish.reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(last.token_ids),
            cached_tokens=self._cached_tokens,
        )
        if last.HasField("output_logprobs"):
            done.output_logprobs.CopyFrom(last.output_logprobs)
        if finish.token is not None:
            done.matched_token_id = finish.token
        return pb.GenerateResponse(complete=done).SerializeToString()

    def _settle(self) -> None:
        raw, self._raw = self._raw, []
        if not raw:
            return
        if self._last == b"":
            first = _parsed(raw[0])
            if first is not None:
                self._prompt_tokens, self._cached_tokens = (
                    first.chunk.prompt_tokens,
                    first.chunk.cached_tokens,
                )
        # Messages one behind another are one message whose repeated fields hold those of all (Protocol Buffers
        # encoding, "Last One Wins"), which is read in a tenth of the time.
        all_of_it = _parsed(b"".join(raw))
        if all_of_it is not None and all_of_it.WhichOneof("response") == "chunk":
            self._tokens.extend(all_of_it.chunk.token_ids)
            self._last = raw[-1]
            return
        for each in raw:
            answer = _parsed(each)
            if answer is None:
                self.readable = False
            elif answer.WhichOneof("response") == "complete":
                self._whole = True
            else:
                self._tokens.extend(answer.chunk.token_ids)
                self._last = each

    def _fitted(self, raw: bytes) -> bytes:
        answer = _parsed(raw)
        kind = None if answer is None else answer.WhichOneof("response")
        if answer is None or kind is None:
            return raw  # the client's to judge, as any message of an engine
        told = getattr(answer, kind)
        told.prompt_tokens, told.cached_tokens = self._prompt_tokens, self._cached_tokens
        if kind == "complete" and told.completion_tokens > len(told.output_ids):
            told.completion_tokens += self._seam  # an engine that counts the whole answer here
        answer_raw: bytes = answer.SerializeToString()
        return answer_raw


def _parsed(raw: bytes) -> pb.GenerateResponse | None:
    try:
        return pb.GenerateResponse.FromString(raw)
    except DecodeError:
        return None
