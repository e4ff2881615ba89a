"""Steady load with known answers, and an account of what became of every request."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

GIVE_UP_S = 240.0  # a client that waits longer calls its request lost
PAUSE_S = 0.5
EVERY_S = 1.5  # a client asks at most so often, and pauses for as long as its last answer took
"""Processors are to be left over for what starts anew, on a slow machine too: Ray gives its head 30 s."""


class Refused(Exception):
    """The gateway cannot answer now; the request may be sent again."""


class Broken(Exception):
    """The answer ended in the middle; some of it had been sent."""


class Lost(Exception):
    """The request was answered with an error that no client would repeat it after."""


@dataclass(kw_only=True)
class Account:
    """What became of the requests so far."""

    right: int = 0
    retried: int = 0  # times that a request was sent again because nothing had come yet
    broken: int = 0  # streams that ended in the middle
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)  # when right answers ended, monotonic seconds
    reasons: Counter[str] = field(default_factory=Counter)

    def gap(self, since: float) -> float:
        """Return the longest time after ``since`` in which no answer ended, seconds."""
        times = [since, *(at for at in self.answered if at >= since), time.monotonic()]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


@dataclass(kw_only=True)
class Load:
    """``workers`` clients that ask the gateway the prompts of ``answers`` in turn, greedily, as streams."""

    url: str
    tokens: int
    answers: dict[tuple[str, str], str]  # (model, prompt) -> what must come
    workers: int = 4
    account: Account = field(default_factory=Account)
    stopping: bool = False

    async def run(self) -> None:
        """Ask until ``stopping`` is set; every request that has begun is seen to its end."""
        async with httpx.AsyncClient(timeout=httpx.Timeout(60.0, connect=5.0)) as client:
            await asyncio.gather(*(self._client(client, number) for number in range(self.workers)))

    async def _client(self, client: httpx.AsyncClient, number: int) -> None:
        asked = list(self.answers)
        turn = number
        while not self.stopping:
            model, prompt = asked[turn % len(asked)]
            turn += 1
            begun = time.monotonic()
            await self._request(client, model, prompt)
            took = time.monotonic() - begun
            await asyncio.sleep(max(took, EVERY_S - took))

    async def _request(self, client: httpx.AsyncClient, model: str, prompt: str) -> None:
        account, give_up = self.account, time.monotonic() + GIVE_UP_S
        while True:
            try:
                text = await ask(client, self.url, model, prompt, self.tokens)
            except Refused as why:
                account.retried += 1
                account.reasons[str(why)] += 1
                if time.monotonic() > give_up:
                    account.lost.append(f"no answer within {GIVE_UP_S:.0f} s, at last: {why}")
                    return
                await asyncio.sleep(PAUSE_S)
            except Broken as why:
                account.broken += 1
                account.reasons[str(why)] += 1
                return
            except Lost as why:
                account.lost.append(str(why))
                return
            else:
                if text == self.answers[model, prompt]:
                    account.right += 1
                    account.answered.append(time.monotonic())
                else:
                    account.wrong.append(f"{prompt!r} -> {text!r}")
                return


async def ask(client: httpx.AsyncClient, url: str, model: str, prompt: str, tokens: int) -> str:
    """Return the greedy completion of ``prompt``, read as a stream.

    Raises:
        Refused: if nothing had come when it failed, and asking again may help.
        Broken: if something had come.
        Lost: for any other answer.
    """
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    pieces: list[str] = []
    done = False
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")[:200]
                kind = Refused if response.status_code == 503 else Lost
                raise kind(f"HTTP {response.status_code}: {text}")
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done = True
                    break
                pieces.append(_piece(json.loads(line[6:]), pieces))
    except httpx.HTTPError as error:
        raise (Broken if pieces else Refused)(type(error).__name__) from error
    if not done:
        raise (Broken if pieces else Refused)("the stream ended early")
    return "".join(pieces)


def _piece(data: dict[str, Any], before: list[str]) -> str:
    if "error" in data:
        text = str(data["error"].get("message", data["error"]))[:160]
        raise (Broken if before else Refused)(text)
    return str(data["choices"][0]["text"]) if data["choices"] else ""


async def known_answers(
    url: str, models: list[str], prompts: list[str], tokens: int, times: int
) -> dict[tuple[str, str], str]:
    """Return the answers to ``prompts``, asked of a fleet that is well: ``times`` times alone and all at once.

    A prompt whose answers differ, because two tokens are equally likely and the batch decides, is left out.
    """
    found: dict[tuple[str, str], str] = {}
    async with httpx.AsyncClient(timeout=300.0) as client:
        for model in models:
            for prompt in prompts:
                alone = [await ask(client, url, model, prompt, tokens) for _ in range(times)]
                found[model, prompt] = alone[0] if len(set(alone)) == 1 else ""
        together = await asyncio.gather(*(ask(client, url, m, p, tokens) for m, p in found))
    return {
        key: text
        for (key, text), other in zip(found.items(), together, strict=True)
        if text and text == other
    }
