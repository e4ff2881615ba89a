"""What a replay sends requests to, and what it learns of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One request's way. Times are monotonic seconds; -1 = it never came to that."""

    due: float  # when the trace wanted it sent
    sent: float = -1.0
    first: float = -1.0  # first token
    end: float = -1.0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # as the engine says, where it says it
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to its first token: a client that sends late shall not look good."""
        return self.first - self.due

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.end - self.first) / max(1, self.output_tokens - 1)


class Target(ABC):
    """An endpoint that generates. Belongs to one event loop; close it in the end."""

    vocabulary: int  # token ids to draw prompts from are below this

    @abstractmethod
    async def open(self) -> None:
        """Find out what the endpoint is; ValueError or OSError with what is wrong."""

    @abstractmethod
    async def generate(
        self, tokens: Sequence[int], output_tokens: int, session: str, outcome: Outcome
    ) -> None:
        """Send a prompt, read its answer to the end, write down what happened. Never raises for a failed
        request: ``outcome.error`` tells."""

    @abstractmethod
    async def close(self) -> None:
        """Close its connections."""


def target(url: str, model: str, timeout: float) -> Target:
    """The target at ``url``: grpc://HOST:PORT for VllmEngine, http(s)://… for the OpenAI API.

    ValueError for any other URL.
    """
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise ValueError(f"--url {url!r}: {error}") from error
    if parts.scheme == "grpc" and host and port:
        from .grpc_target import GrpcTarget

        return GrpcTarget(parts.netloc, model, timeout)
    if parts.scheme in ("http", "https") and host and port != 0:
        from .openai_target import OpenAITarget

        return OpenAITarget(url, model, timeout)
    raise ValueError(f"--url {url!r} is neither grpc://HOST:PORT nor http://HOST:PORT")
