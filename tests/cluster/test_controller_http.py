"""The controller's HTTP port under clients that do not speak HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from npufleet.cluster.config import from_dict
from npufleet.cluster.controller.health import Health
from npufleet.cluster.controller.http import ControllerHttp
from npufleet.cluster.controller.progress import ProgressBoard
from npufleet.cluster.controller.registry import Registry
from npufleet.cluster.deploy.wish import Wish


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    """Where one listens, over a controller that only has what the port's own series need."""
    controller: Any = SimpleNamespace(
        changes=SimpleNamespace(wish=Wish.of(from_dict({"models": [{"name": "m", "source": "/m"}]}))),
        registry=Registry(),
        health=Health(),
        progress=ProgressBoard(),
    )
    http = ControllerHttp(controller)
    await http.start("127.0.0.1", 0)
    port = urlsplit(http.metrics_url).port
    assert port is not None
    yield "127.0.0.1", port
    await http.stop()


async def exchange(address: tuple[str, int], sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # the start of TLS
        b"GET / HTTP/9.9.9\r\n\r\n",
        b"GET /status HTTP/1.1\r\nno colon here\r\n\r\n",
        b"GET /status HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_400_and_one_line_of_log(
    address: tuple[str, int], garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert (await exchange(address, garbage)).split(b" ")[1] == b"400"
    assert all(record.exc_info is None and record.levelno < logging.WARNING for record in caplog.records)
    assert b"200 OK" in await exchange(
        address, b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    )


async def test_a_fault_of_ours_keeps_its_traceback(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    answer = await exchange(address, b"GET /status HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    assert answer.split(b" ")[1] == b"500"  # this controller has no status
    (record,) = caplog.records
    assert isinstance(cast(Any, record.exc_info)[1], AttributeError)
