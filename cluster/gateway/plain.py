"""A shorter way to the bytes of streams that are nothing but text.

vLLM's frontend builds and serializes three nested models for each token of a stream. In a stream of plain text two
events differ in the text alone, so here the first event that vLLM makes is cut at its text, and further ones are put
together from the halves, with the text written by the serializer that vLLM's models use. Whatever is more than plain
text, and of each stream the first events, the last ones and errors, go vLLM's way. A test holds that both ways give the
same bytes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from pydantic_core import to_json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.utils.api_utils import should_include_usage
from vllm.outputs import CompletionOutput, RequestOutput

from .outlet import OUTLET
from .shortcut import Shortcut

Opener = Callable[[str, str, str, list[int]], Shortcut | None]  # as FleetClient.shortcut without its outlet

# What stands before the text in an event. A quote within a JSON string is escaped, so this stands nowhere else.
_CHAT = '"choices":[{"index":0,"delta":{"content":'
_COMPLETION = '"choices":[{"index":0,"text":'


def is_plain_chat(chat: OpenAIServingChat, request: ChatCompletionRequest) -> bool:
    """True where the events in the middle of a chat stream are its text and nothing else."""
    _, with_usage = should_include_usage(request.stream_options, chat.enable_force_include_usage)
    more = request.logprobs or request.echo or request.return_token_ids or with_usage
    logged = chat.enable_log_outputs and chat.request_logger
    return chat.parser_cls is None and request.n in (None, 1) and not more and not logged


def is_plain_completion(
    completion: OpenAIServingCompletion, request: CompletionRequest, prompts: int
) -> bool:
    """The same for a completion of ``prompts`` prompts."""
    _, with_usage = should_include_usage(request.stream_options, completion.enable_force_include_usage)
    more = request.logprobs is not None or request.echo or request.return_token_ids or with_usage
    return prompts == 1 and request.n in (None, 1) and not more


class PlainChat(OpenAIServingChat):
    """vLLM's chat frontend with the shorter way."""

    shortcuts = True  # False where something must see each event

    @classmethod
    def over(cls, chat: OpenAIServingChat, *, shortcuts: bool) -> PlainChat:
        """The same frontend as ``chat``, made of the same parts."""
        made = cls.__new__(cls)
        made.__dict__.update(chat.__dict__)
        made.shortcuts = shortcuts
        return made

    def chat_completion_stream_generator(  # type: ignore[override]  # vLLM's is a generator, this returns one
        self, request: ChatCompletionRequest, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        """As vLLM's."""
        usual = super().chat_completion_stream_generator
        if not is_plain_chat(self, request):
            return usual(request, result_generator, *args, **kwargs)
        return _shorter(
            result_generator,
            lambda handed: usual(request, handed, *args, **kwargs),
            marker=_CHAT,
            lead=1,
            opener=_opener(self),
        )


class PlainCompletion(OpenAIServingCompletion):
    """vLLM's completion frontend with the shorter way."""

    shortcuts = True  # False where something must see each event

    @classmethod
    def over(cls, completion: OpenAIServingCompletion, *, shortcuts: bool) -> PlainCompletion:
        """The same frontend as ``completion``, made of the same parts."""
        made = cls.__new__(cls)
        made.__dict__.update(completion.__dict__)
        made.shortcuts = shortcuts
        return made

    def completion_stream_generator(  # type: ignore[override]
        self, request: CompletionRequest, engine_inputs: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        """As vLLM's."""
        usual = super().completion_stream_generator
        if not is_plain_completion(self, request, len(engine_inputs)):
            return usual(request, engine_inputs, result_generator, *args, **kwargs)
        return _shorter(
            result_generator,
            lambda handed: usual(request, engine_inputs, handed, *args, **kwargs),
            marker=_COMPLETION,
            lead=0,
            opener=_opener(self),
        )


class _Handed(AsyncIterator[Any]):
    """Outputs for vLLM's generator, which is asked for events only where it has what it needs for them."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.error: Exception | None = None

    async def __anext__(self) -> Any:
        if self.waiting:
            return self.waiting.pop(0)
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration


async def _shorter(
    results: AsyncIterator[Any],
    usual: Callable[[AsyncIterator[Any]], AsyncGenerator[str, None]],
    *,
    marker: str,
    lead: int,
    opener: Opener | None,
) -> AsyncGenerator[str, None]:
    """The events of ``usual``; ``lead`` of them come before the first one with text."""
    handed = _Handed()
    whole = usual(handed)
    before = after = ""
    skipped: list[int] = []  # tokens that vLLM's generator has not seen
    counted = False  # a token has come: until then vLLM shows nothing for an output without any text or token
    shortcut: Shortcut | None = None
    sent = 0
    try:
        async for result in results:
            if shortcut is not None:
                shortcut.stop()
            output = _only(result)
            came = 0 if output is None else len(output.token_ids)
            shown = output is not None and (counted or bool(output.text or came))
            counted = counted or came > 0
            ends = output is None or output.finish_reason is not None
            if before and not ends and output is not None:
                skipped += output.token_ids
                if shown:
                    yield f"{before}{to_json(output.text).decode()}{after}"
                    sent += 1
            else:
                handed.waiting.append(_with_tokens(result, output, skipped))
                for _ in range(lead):
                    yield await anext(whole)
                    sent += 1
                lead = 0
                if shown and not ends and output is not None:
                    event = await anext(whole)
                    before, after = _cut(event, marker, output.text)
                    yield event
                    sent += 1
                    if opener is not None:
                        shortcut = opener(_output(result).request_id, before, after, skipped)
            if shortcut is not None:
                shortcut.wait(came, sent)
    except Exception as error:  # noqa: BLE001 - supervisor: vLLM's generator tells the client of it
        handed.error = error
    finally:
        if shortcut is not None:
            shortcut.stop()
    async for event in whole:
        yield event


def _opener(serving: PlainChat | PlainCompletion) -> Opener | None:
    """Makes shortcuts to the answer of the request under way; None where there are none."""
    outlet = OUTLET.get()
    if outlet is None or not serving.shortcuts:
        return None
    client: Any = serving.engine_client
    return lambda request_id, *rest: client.shortcut(request_id, outlet, *rest)


def _output(result: Any) -> RequestOutput:
    """The output of a result, which comes with its prompt's number from completions."""
    output: RequestOutput = result[1] if isinstance(result, tuple) else result
    return output


def _only(result: Any) -> CompletionOutput | None:
    """The one choice of an output."""
    output = _output(result)
    return output.outputs[0] if len(output.outputs) == 1 else None


def _with_tokens(result: Any, output: CompletionOutput | None, skipped: list[int]) -> Any:
    """``result`` with the tokens before it that went the shorter way: the usage counts them."""
    if output is not None and skipped:
        output.token_ids = [*skipped, *output.token_ids]
    return result


def _cut(event: str, marker: str, text: str) -> tuple[str, str]:
    """What stands before and after ``text`` in ``event``."""
    start = event.index(marker) + len(marker)
    written = to_json(text).decode()
    assert event.startswith(written, start), event
    return event[:start], event[start + len(written) :]
