"""Models that come, go and change while a gateway runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from npufleet.cluster.gateway import server
from npufleet.cluster.gateway.metrics import GatewayMetrics
from npufleet.cluster.gateway.server import Gateway, bind, serve_gateway
from npufleet.cluster.gateway.settings import GatewaySettings, ModelSpec
from npufleet.cluster.gateway.slots import Slot


class FakeSlot:
    """A slot whose frontend is up when the test says so."""

    made: list[FakeSlot] = []  # noqa: RUF012 - cleared by the fixture

    def __init__(self, spec: ModelSpec, *rest: Any) -> None:
        self.spec = spec
        self.up = asyncio.Event()
        self.left = self.closed = False
        FakeSlot.made.append(self)

    async def wait(self) -> None:
        await self.up.wait()

    async def leave(self) -> None:
        self.left = True

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    FakeSlot.made.clear()
    monkeypatch.setattr(server, "Slot", FakeSlot)
    picker: Any = None
    made = Gateway(picker, GatewaySettings(), bind("127.0.0.1", 0), GatewayMetrics())
    made.add_model(ModelSpec(name="m"))
    yield made
    await made.close()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_replaced_model_answers_all_the_while(gateway: Gateway) -> None:
    gateway.replace_model(ModelSpec(name="m", args={"max_model_len": 5}))
    await settle()
    old, new = FakeSlot.made
    assert gateway._slots["m"] is old and not old.left
    new.up.set()
    await settle()
    assert gateway._slots["m"] is new and old.left and not new.closed


async def test_a_retired_model_takes_nothing_new_and_ends_what_it_has(gateway: Gateway) -> None:
    gateway.replace_model(ModelSpec(name="m"))
    gateway.retire_model("m")
    gateway.retire_model("m")
    await settle()
    old, new = FakeSlot.made
    assert gateway._slots == {} and old.left
    new.up.set()
    await settle()
    assert gateway._slots == {} and new.closed, "it was removed meanwhile"


async def test_a_slot_leaves_when_its_requests_have_ended_or_its_time_is_over() -> None:
    for grace, answering in ((30.0, 0), (0.0, 3)):
        slot = Slot.__new__(Slot)
        slot.spec = ModelSpec(name="m")
        slot._settings = GatewaySettings(shutdown_grace=grace)
        slot._task = asyncio.create_task(asyncio.sleep(0))
        closed: list[bool] = []
        slot.answering = answering
        slot.frontend = SimpleNamespace(close=lambda done=closed: done.append(True))  # type: ignore[assignment]
        await asyncio.wait_for(slot.leave(), 10)
        assert closed == [True]


async def test_a_slot_does_not_leave_while_a_request_is_on_its_way_to_an_engine_or_from_there() -> None:
    ready, closed = asyncio.Event(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await ready.wait()
        assert not closed

    slot = Slot.__new__(Slot)
    slot.spec, slot.answering = ModelSpec(name="m"), 0
    slot._settings = GatewaySettings()
    slot._task = asyncio.create_task(asyncio.sleep(0))
    core = SimpleNamespace(active=0)  # it is being rendered, or its last output has not been read yet
    slot.frontend = SimpleNamespace(app=app, core=core, close=lambda: closed.append(True))  # type: ignore[assignment]
    nothing: Any = None
    answer = asyncio.create_task(slot.answer(nothing, nothing, nothing))
    leaving = asyncio.create_task(slot.leave())
    await settle()
    assert not closed
    ready.set()
    await answer
    await asyncio.wait_for(leaving, 10)
    assert closed == [True]


async def test_one_of_several_gateways_opens_its_port_when_its_models_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeSlot.made.clear()
    monkeypatch.setattr(server, "Slot", FakeSlot)
    picker: Any = None
    with bind("127.0.0.1", 0, reuse_port=True) as other:  # it has the port already
        settings = GatewaySettings(port=other.getsockname()[1], reuse_port=True)

        async def starting(warm: float) -> Gateway:
            return await serve_gateway([ModelSpec(name="m")], picker, settings, warm=warm)

        task = asyncio.create_task(starting(60.0))
        await asyncio.sleep(0.2)
        assert not task.done()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", settings.port)
        FakeSlot.made[0].up.set()
        made = await task
        (await asyncio.open_connection("127.0.0.1", settings.port))[1].close()
        await made.close()
        late = await starting(0.05)  # engines may be away for long
        (await asyncio.open_connection("127.0.0.1", settings.port))[1].close()
        await late.close()


async def test_a_gateway_that_leaves_its_port_to_others_sends_no_client_into_a_closed_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LINGER_S", 60.0)
    picker: Any = None
    made = await serve_gateway([], picker, GatewaySettings(port=0, reuse_port=True))
    reader, writer = await asyncio.open_connection("127.0.0.1", made.port)

    async def ask() -> bytes:
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.partition(b":")[2]))
        return head.lower()

    port = made.port
    async with asyncio.timeout(30):
        assert b"connection: close" not in await ask()
        closing = asyncio.create_task(made.close())
        with pytest.raises(ConnectionRefusedError):
            while True:
                with contextlib.suppress(ConnectionResetError):  # accepted by the kernel as the port closed
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
        head = await ask()
        assert head.startswith(b"http/1.1 200") and b"connection: close" in head
        assert await reader.read() == b""
        await closing  # as soon as nobody is connected
    writer.close()
