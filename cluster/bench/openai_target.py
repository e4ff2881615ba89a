"""An OpenAI endpoint: ``/v1/completions`` with token ids as the prompt, streamed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from .target import Outcome, Target

_SAFE_IDS = 250  # without a vocabulary to ask for, ids that every tokenizer has


class OpenAITarget(Target):
    """Streams completions; reads token counts from the usage at the end."""

    def __init__(self, url: str, model: str, timeout: float) -> None:
        self._model = model
        self._url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout, connect=30.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )
        self.vocabulary = _SAFE_IDS

    async def open(self) -> None:
        """Find the model to ask for, if none was named."""
        try:
            answer = await self._client.get(f"{self._url}/v1/models")
            answer.raise_for_status()
            names = [item["id"] for item in answer.json()["data"]]
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise OSError(f"{self._url}: no OpenAI API answers: {error!r}") from error
        if not self._model and len(names) != 1:
            raise ValueError(f"{self._url} serves {', '.join(names) or 'no model'}; name one with --model")
        self._model = self._model or names[0]
        if self._model not in names:
            raise ValueError(f"{self._url} has no model {self._model!r}; there is: {', '.join(names)}")

    async def generate(
        self, tokens: Sequence[int], output_tokens: int, session: str, outcome: Outcome
    ) -> None:
        """One completion."""
        body = {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"x-session-id": session} if session else {}
        outcome.sent = time.monotonic()
        try:
            async with self._client.stream(
                "POST", f"{self._url}/v1/completions", json=body, headers=headers
            ) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    outcome.error = f"HTTP {answer.status_code}: {text[:200]}"
                    return
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        self._read(line[6:], outcome)
        except (httpx.HTTPError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
            return
        if outcome.end < 0:
            outcome.error = outcome.error or "the stream ended without [DONE]"

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    @staticmethod
    def _read(data: str, outcome: Outcome) -> None:
        now = time.monotonic()
        if data == "[DONE]":
            outcome.end = now
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            outcome.error = json.dumps(event["error"])[:200]
        if event.get("choices") and outcome.first < 0:
            outcome.first = now
        if usage := event.get("usage"):
            outcome.prompt_tokens = usage["prompt_tokens"]
            outcome.output_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            outcome.cached_tokens = details.get("cached_tokens") or 0
