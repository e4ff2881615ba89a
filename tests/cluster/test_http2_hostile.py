"""Clients of our own HTTP/2 server that want to hold it up: none of them holds more than its own connection."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from npufleet.cluster.router.wire import path
from npufleet.cluster.transport.http2 import frames, sending
from npufleet.cluster.transport.http2.served import ServedCall
from npufleet.cluster.transport.http2.server import Http2Server
from npufleet.cluster.transport.http2.serving import ServerLimits

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


async def test_windows_that_move_again_and_again_cost_no_look_at_each_stream(
    monkeypatch: pytest.MonkeyPatch,
):
    looks = 0
    before = sending.Sender._send_frame

    def counting(self: sending.Sender, stream: sending.Sending) -> bool:
        nonlocal looks
        looks += 1
        return before(self, stream)

    many = 200
    async with fleet(FakeEngine(name="a"), settings=OWN) as f, dialled(f) as peer:
        peer.write(CLOSED, *(call(2 * at + 1, b"", where=path("GetServerInfo")) for at in range(many)))
        await until(lambda: sum(bool(each.unsent) for each in served(f)) == many)
        monkeypatch.setattr(sending.Sender, "_send_frame", counting)
        peer.write(
            *(frames.settings({frames.INITIAL_WINDOW_SIZE: at % 2}) for at in range(1000)),
            frames.window_update(0, 1) * 1000,
            *(frames.window_update(2 * (at % many) + 1, 1) for at in range(1000)),
            frames.frame(frames.PING, 0, 0, bytes(8)),
        )
        await peer.until(frames.PING)
        assert looks < 4 * 1000 + 20 * many, "2,000,000 where each frame looks at each stream"
        peer.write(frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 20}))
        await until(lambda: nothing_is_left(f) and not served(f))


async def test_answers_that_are_not_taken_count_as_calls():
    few = replace(OWN, max_streams=20)
    async with fleet(FakeEngine(name="a"), settings=few) as f, dialled(f) as peer:
        peer.write(CLOSED)
        where = path("GetServerInfo")
        for at in range(0, 60, 10):
            peer.write(*(call(2 * each + 1, b"", where=where) for each in range(at, at + 10)))
            await asyncio.sleep(0.05)
        await until(lambda: sum(bool(each.unsent) for each in served(f)) == 20)
        refused = 0
        while refused < 40:
            refused += bool((await peer.until(frames.HEADERS))[0] & frames.END_STREAM)
        assert len(served(f)) == len(f.router._server._tasks) == 20
        peer.write(frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 20}))
        await until(lambda: not served(f) and not f.router._server._tasks)
        await answered(f)


@pytest.mark.parametrize("when", ["before", "behind"])
async def test_metadata_that_grpc_does_not_allow_ends_its_call(when: str):
    async def handler(request: bytes, context: Any) -> bytes:
        if when == "before":
            await context.send_initial_metadata((("x-engine", "d\xe9j\xe0"),))
        context.set_trailing_metadata((("x-engine", "two\nlines"),))
        return b"answer"

    server = Http2Server(ServerLimits())
    kinds = {"Call": grpc.unary_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", kinds),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="gRPC allows printable ASCII only"):
                await channel.unary_unary("/test.Service/Call")(b"", timeout=20)
    finally:
        await server.stop(None)
