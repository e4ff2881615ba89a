"""Streams that run while something else happens to the fleet."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import openai

from .fleet import MODEL


@dataclass
class Stream:
    """One streamed answer: its pieces, and the error that ended it if one did."""

    index: int
    pieces: int = 0
    tokens: int = 0  # as the usage tells them
    finished: bool = False
    error: openai.APIError | None = None
    begun: threading.Event = field(default_factory=threading.Event)


class Load:
    """Some streams at once, through the gateway."""

    def __init__(self, client: openai.OpenAI, count: int, tokens: int = 96) -> None:
        """Start ``count`` streams of ``tokens`` tokens each and return when each has its first."""
        self._client = client
        self.tokens = tokens
        self.streams = [Stream(index) for index in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(stream,)) for stream in self.streams]
        for thread in self._threads:
            thread.start()
        for stream in self.streams:
            assert stream.begun.wait(180), "no first token"

    def _run(self, stream: Stream) -> None:
        try:
            with self._client.completions.create(
                model=MODEL,
                prompt=f"{stream.index}. Once upon a time",
                max_tokens=self.tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            ) as chunks:
                for chunk in chunks:
                    stream.pieces += bool(chunk.choices and chunk.choices[0].text)
                    stream.finished |= bool(chunk.choices and chunk.choices[0].finish_reason)
                    stream.tokens = chunk.usage.completion_tokens if chunk.usage else stream.tokens
                    stream.begun.set()
        except openai.APIError as error:
            stream.error = error
        finally:
            stream.begun.set()

    def wait(self) -> tuple[list[Stream], list[Stream]]:
        """Return (untouched, broken) streams; every stream must be one of the two."""
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive(), "a stream hangs"
        whole = [stream for stream in self.streams if stream.finished and stream.error is None]
        broken = [stream for stream in self.streams if stream.error is not None]
        assert len(whole) + len(broken) == len(self.streams)
        return whole, broken
