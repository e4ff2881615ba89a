"""Clients of our own HTTP/2 server that want to hold it up: none of them holds more than its own connection."""

from __future__ import annotations

import asyncio

import pytest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from npufleet.cluster.transport.http2 import frames, sending
from npufleet.cluster.transport.http2.served import ServedCall

from .router_fakes import FakeEngine, Fleet, fleet, until
from .test_http2_server import GENERATE, OWN, REQUEST, answered, call, dialled
from .test_router_cancels import nothing_is_left

CLOSED = frames.settings({frames.INITIAL_WINDOW_SIZE: 0})
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def begun(stream: int, request: bytes, where: str = GENERATE) -> bytes:
    """As :func:`call`, without the end of the request."""
    whole = call(stream, request, where=where)
    size = len(request) + 5
    return whole[: -size - 9] + frames.frame(frames.DATA, 0, stream, whole[-size:])


def served(f: Fleet) -> list[ServedCall]:
    """The calls that are under way."""
    return [each for connection in f.router._server._connections for each in connection._streams.values()]


@pytest.mark.parametrize("more", [b"\1\0\0\0\1x", b"\0\0\0\0\1x", b"\0\xff\xff\xff\xff"])
async def test_more_of_a_request_whose_answer_waits_is_refused_once(more: bytes):
    async with fleet(FakeEngine(name="a"), settings=OWN) as f, dialled(f) as peer:
        peer.write(CLOSED, begun(1, REQUEST))
        await until(lambda: any(each.unsent for each in served(f)))
        for _ in range(3):
            peer.write(frames.frame(frames.DATA, 0, 1, more))
            await answered(f)
        peer.write(frames.window_update(1, 1 << 20))
        async with asyncio.timeout(10):
            while not (await peer.until(frames.HEADERS))[0] & frames.END_STREAM:
                pass
        await until(lambda: nothing_is_left(f))


async def test_a_deadline_ends_a_call_whose_status_waits_for_its_messages():
    async with fleet(FakeEngine(name="a"), settings=OWN) as f, dialled(f) as peer:
        peer.write(CLOSED, call(1, REQUEST, more=(("grpc-timeout", "1S"),)))
        async with asyncio.timeout(20):
            while not (await peer.until(frames.HEADERS))[0] & frames.END_STREAM:
                pass
        await until(lambda: not served(f) and nothing_is_left(f))


async def test_requests_that_a_handler_has_no_time_for_stay_with_the_client():
    asked = ServerReflectionRequest(list_services="").SerializeToString()
    message = b"\0" + len(asked).to_bytes(4, "big") + asked
    async with fleet(FakeEngine(name="a"), settings=OWN) as f, dialled(f) as peer:
        peer.write(CLOSED, begun(1, asked, REFLECTION))
        await until(lambda: any(each.unsent for each in served(f)))
        (waiting,) = served(f)
        payload = message * (16_000 // len(message))
        sent = 0
        while waiting.receive_window >= len(payload) and sent < 200:
            peer.write(frames.frame(frames.DATA, 0, 1, payload))
            sent += len(payload) <= waiting.receive_window
            await asyncio.sleep(0.01)
        assert sent < 60, "its window of 256 KiB is given back when they are taken"
        await answered(f)
        peer.write(frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 30}), frames.window_update(0, 1 << 30))
        await until(lambda: waiting.receive_window > 128 << 10)


async def test_a_client_that_reads_no_refusals_loses_its_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sending, "_MOST_UNWRITTEN", 64 << 10)
    async with fleet(FakeEngine(name="a"), settings=OWN) as f, dialled(f) as peer:
        peer.write(frames.frame(frames.PING, 0, 0, bytes(8)))
        await peer.until(frames.PING)
        mine = str(peer.writer.get_extra_info("sockname")[1])
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        stream = 1
        while any(connection.peer.endswith(mine) for connection in f.router._server._connections):
            many = range(stream, stream + 400, 2)
            peer.write(*(call(each, b"", where="/x/" + "y" * 190) for each in many))
            stream += 400
            await asyncio.sleep(0.005)
            assert stream < 200_000, "what it does not read is kept without end"
        await answered(f)


async def test_a_frame_of_many_settings_moves_the_streams_once(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    before = sending.Sender._set_initial_window

    def counting(self: sending.Sender, size: int, calls: object) -> None:
        sizes.append(size)
        before(self, size, calls)  # type: ignore[arg-type]

    monkeypatch.setattr(sending.Sender, "_set_initial_window", counting)
    many = b"".join(frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, size) for size in range(2000))
    async with fleet(FakeEngine(name="a"), settings=OWN) as f, dialled(f) as peer:
        peer.write(frames.frame(frames.SETTINGS, 0, 0, many), frames.frame(frames.PING, 0, 0, bytes(8)))
        await peer.until(frames.PING)
    assert 1999 in sizes and 1998 not in sizes
