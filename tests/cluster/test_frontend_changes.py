"""What the front end does with a change of the wish: only what the gateway has to know, and when."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp

from npufleet.cluster import config
from npufleet.cluster.deploy.wish import Wish
from npufleet.cluster.frontend import Frontend, model_spec


class Gateway:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda told: self.told.append((name, getattr(told, "name", told)))


def wish(*names: str, **engine: Any) -> Wish:
    models = [{"name": name, "source": "/m", "engine": engine} for name in names]
    return Wish.of(config.from_dict({"models": models}))


def front(start: Wish) -> tuple[Frontend, Gateway]:
    made, gateway = Frontend.__new__(Frontend), Gateway()
    made._wish = start
    made._served = {model.name: model_spec(model) for model in start.config.models}
    made._gateway = gateway  # type: ignore[assignment]
    return made, gateway


async def test_models_come_and_go_at_once_and_settings_change_at_the_end() -> None:
    before = wish("a", "b")
    made, gateway = front(before)
    await made.reconfigure(before.to_dict())
    assert gateway.told == []
    after = wish("a", "c", tool_call_parser="hermes")
    await made.reconfigure(replace(after, previous=before).to_dict())
    assert gateway.told == [("retire_model", "b"), ("add_model", "c")]
    await made.reconfigure(after.to_dict())
    assert gateway.told[2:] == [("replace_model", "a")]
    await made.reconfigure(after.to_dict())
    assert len(gateway.told) == 3


async def test_a_change_that_was_taken_back_or_seen_only_at_its_end() -> None:
    before, after = wish("a"), wish("a", max_model_len=128)
    made, gateway = front(before)
    await made.reconfigure(replace(after, previous=before).to_dict())
    await made.reconfigure(before.to_dict())
    assert gateway.told == []
    await made.reconfigure(after.to_dict())
    assert gateway.told == [("replace_model", "a")]
    assert made.config == after.config


async def test_router_and_gateway_of_a_front_end_that_leaves_drain_at_once() -> None:
    both, told = asyncio.Barrier(2), []

    async def wait(*_: float) -> None:
        await both.wait()

    async def close(*_: float) -> None:
        told.append("closed")

    made = Frontend.__new__(Frontend)
    made._gateway = SimpleNamespace(close=wait)  # type: ignore[assignment]
    made._router = SimpleNamespace(drain=wait, close=close)  # type: ignore[assignment]
    async with asyncio.timeout(10):
        await made.__del__()
    assert told == ["closed"]


async def test_each_front_end_says_where_its_own_series_are() -> None:
    models = [{"name": "a", "source": "/m"}]
    tls = {"certificate": "/c", "key": "/k"}
    made = Frontend.__new__(Frontend)
    made._exporter = None
    made._gateway = SimpleNamespace(port=8000, series=lambda: b"ours 1\n")  # type: ignore[assignment]
    made._router = SimpleNamespace(metrics_port=None)  # type: ignore[assignment]
    made._wish = Wish.of(config.from_dict({"models": models}))
    assert await made._metrics_urls("127.0.0.1") == {"gateway": "http://127.0.0.1:8000/metrics"}
    made._wish = Wish.of(config.from_dict({"models": models, "gateway": {"tls": tls}}))
    assert await made._metrics_urls("127.0.0.1") == {"gateway": "https://127.0.0.1:8000/metrics"}
    made._wish = Wish.of(config.from_dict({"models": models, "gateway": {"tls": tls}, "front_ends": 2}))
    made._router = SimpleNamespace(metrics_port=9)  # type: ignore[assignment]
    urls = await made._metrics_urls("127.0.0.1")
    assert urls == await made._metrics_urls("127.0.0.1") and urls["router"] == "http://127.0.0.1:9/metrics"
    async with aiohttp.ClientSession() as session, session.get(urls["gateway"]) as answer:
        assert await answer.text() == "ours 1\n"
    assert made._exporter is not None
    await made._exporter.cleanup()
