"""Our own HTTP/2 server as the router's front: against grpcio's client, and against clients that break HTTP/2."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from npufleet.cluster.admission.settings import AdmissionSettings
from npufleet.cluster.router.server import serve_router
from npufleet.cluster.router.wire import path
from npufleet.cluster.tls import ServerTls
from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.requests import read, timeout_seconds

from . import router_fakes
from .certificates import Authority
from .http2_peer import Peer, headers
from .router_fakes import FakeEngine, Fleet, fleet, generate_request, tokens_of, until
from .test_router_cancels import many_cancels, nothing_is_left

Code = grpc.StatusCode
OWN = replace(router_fakes.QUICK, front="http2")
ROOT = Path(__file__).resolve().parents[2]
GENERATE = path("Generate")


def call(
    stream: int, request: bytes, *, where: str = GENERATE, more: tuple[tuple[str, str], ...] = ()
) -> bytes:
    """A whole unary request."""
    pairs = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", where),
        (":authority", "x"),
        ("te", "trailers"),
    ]
    block = headers(stream, [*pairs, ("content-type", "application/grpc"), *more])
    body = b"\0" + len(request).to_bytes(4, "big") + request
    return block + frames.frame(frames.DATA, frames.END_STREAM, stream, body)


REQUEST = generate_request(2).SerializeToString()


@asynccontextmanager
async def dialled(f: Fleet, *, greet: bool = True) -> AsyncIterator[Peer]:
    """A connection of bare frames to the router."""
    host, _, port = f.router.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    peer = Peer(reader, writer)
    if greet:
        peer.write(frames.PREFACE + frames.settings({}))
    try:
        yield peer
    finally:
        writer.close()


async def answered(f: Fleet) -> None:
    """The server still answers others."""
    assert await tokens_of(f.stub.Generate(generate_request(2))) == [6, 7]


async def error_of(peer: Peer) -> int:
    """The HTTP/2 error that the server ends the connection with."""
    async with asyncio.timeout(5):
        _, _, payload = await peer.until(frames.GOAWAY)
        return frames.TWO_NUMBERS.unpack_from(payload)[1]


async def test_frames_in_frames_out():
    async with fleet(FakeEngine(name="a"), settings=OWN) as f, dialled(f) as peer:
        peer.write(call(1, REQUEST))
        flags, stream, _ = await peer.until(frames.HEADERS)
        assert (flags & frames.END_STREAM, stream) == (0, 1)
        _, _, first = await peer.until(frames.DATA)
        assert first[0] == 0 and int.from_bytes(first[1:5], "big") == len(first) - 5
        flags, stream, _ = await peer.until(frames.HEADERS)
        assert flags & frames.END_STREAM and stream == 1
        peer.write(frames.frame(frames.PING, 0, 0, b"12345678"))
        flags, _, payload = await peer.until(frames.PING)
        assert flags & frames.ACK and payload == b"12345678"


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", frames.PROTOCOL_ERROR),
        (frames.PREFACE + frames.frame(frames.PING, 0, 0, b"12345678"), frames.PROTOCOL_ERROR),
        (frames.frame(frames.DATA, 0, 1, b"x"), frames.PROTOCOL_ERROR),
        (headers(2, [(":method", "POST")]), frames.PROTOCOL_ERROR),
        (
            frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
            frames.COMPRESSION_ERROR,
        ),
        (
            frames.frame(frames.HEADERS, 0, 1, b"") + frames.frame(frames.CONTINUATION, 0, 1),
            frames.ENHANCE_YOUR_CALM,
        ),
        (
            headers(1, [("a", "b")], whole=False) + frames.frame(frames.PING, 0, 0, bytes(8)),
            frames.PROTOCOL_ERROR,
        ),
        (frames.window_update(0, 0), frames.PROTOCOL_ERROR),
        (frames.window_update(0, 2**31 - 1), frames.FLOW_CONTROL_ERROR),
        (
            call(1, REQUEST)
            + frames.window_update(1, 2**31 - 1 - frames.DEFAULT_WINDOW)
            + frames.settings({frames.INITIAL_WINDOW_SIZE: frames.DEFAULT_WINDOW + 1}),
            frames.FLOW_CONTROL_ERROR,
        ),
        (frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}), frames.FLOW_CONTROL_ERROR),
        (frames.frame(frames.PUSH_PROMISE, frames.END_HEADERS, 1, bytes(4)), frames.PROTOCOL_ERROR),
        (frames.frame(frames.DATA, 0, 1, bytes(16_385)), frames.FRAME_SIZE_ERROR),
    ],
)
async def test_a_client_that_breaks_http2_loses_its_connection_alone(sent: bytes, error: int):
    greet = not sent.startswith((b"GET", b"PRI"))
    async with fleet(FakeEngine(name="a"), settings=OWN) as f, dialled(f, greet=greet) as peer:
        peer.write(sent)
        assert await error_of(peer) == error
        await answered(f)


@pytest.mark.parametrize(
    "pairs",
    [
        [(":method", "POST"), (":scheme", "http"), ("content-type", "application/grpc")],
        [(":method", "POST"), (":path", "/a"), ("X-Upper", "1"), ("content-type", "application/grpc")],
        [(":method", "POST"), (":path", "/a"), ("a", "b"), (":scheme", "http")],
        [(":method", "POST"), (":path", "/a"), (":path", "/b")],
        [(":method", "POST"), (":path", "/a"), ("grpc-timeout", "1x"), ("content-type", "application/grpc")],
        [(":method", "POST"), (":path", "/a"), ("connection", "close")],
        [(":method", "POST"), (":path", "/a"), ("\u00e9", "1"), ("content-type", "application/grpc")],
        [(":method", "POST"), (":path", "/a"), ("a b", "1"), ("content-type", "application/grpc")],
        [(":method", "POST"), (":path", "/a"), ("a", "\u00e9"), ("content-type", "application/grpc")],
        [
            (":method", "POST"),
            (":path", "/a"),
            ("grpc-timeout-x", "1S"),
            ("content-type", "application/grpc"),
        ],
    ],
)
async def test_a_stream_that_is_no_request_ends_alone(pairs: list[tuple[str, str]]):
    async with fleet(FakeEngine(name="a"), settings=OWN) as f, dialled(f) as peer:
        peer.write(headers(1, pairs, ends=True), call(3, REQUEST))
        _, stream, payload = await peer.until(frames.RST_STREAM)
        assert stream == 1 and frames.NUMBER.unpack(payload)[0] == frames.PROTOCOL_ERROR
        flags, stream, _ = await peer.until(frames.HEADERS)
        assert stream == 3 and not flags & frames.END_STREAM


@pytest.mark.parametrize(
    ("method", "kind", "status"), [("GET", "application/grpc", b"405"), ("POST", "a/b", b"415")]
)
async def test_what_is_not_grpc_is_told_so_in_http(method: str, kind: str, status: bytes):
    async with fleet(FakeEngine(name="a"), settings=OWN) as f, dialled(f) as peer:
        pairs = [(":method", method), (":scheme", "http"), (":path", "/"), ("content-type", kind)]
        peer.write(headers(1, pairs, ends=True))
        flags, _, block = await peer.until(frames.HEADERS)
        assert flags & frames.END_STREAM and status in block


async def test_limits_of_messages_and_methods():
    few = replace(OWN, max_request_bytes=1000)
    async with fleet(FakeEngine(name="a"), settings=few) as f:
        for request, code in (
            (generate_request(1, tuple(range(2000))), Code.RESOURCE_EXHAUSTED),
            (generate_request(2), Code.OK),
        ):
            made = f.stub.Generate(request)
            with_error = pytest.raises(grpc.aio.AioRpcError) if code is not Code.OK else None
            if with_error is None:
                assert await tokens_of(made) == [6, 7]
            else:
                with with_error as refused:
                    await tokens_of(made)
                assert refused.value.code() is code
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await f.channel.unary_unary("/no.Such/Method")(b"")
        assert unknown.value.code() is Code.UNIMPLEMENTED
        zipped = f.channel.unary_unary(path("HealthCheck"))(b"x" * 100, compression=grpc.Compression.Gzip)
        with pytest.raises(grpc.aio.AioRpcError) as compressed:
            await zipped
        assert compressed.value.code() is Code.UNIMPLEMENTED
        await answered(f)


async def test_no_more_calls_than_the_limit_run_at_once():
    engine = FakeEngine(name="a", delay=60)
    async with fleet(engine, settings=replace(OWN, max_streams=3)) as f:
        held = [f.stub.Generate(generate_request(2, request_id=f"{i}")) for i in range(3)]
        await until(lambda: len(engine.seen) == 3)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await f.channel.unary_unary(path("GetModelInfo"))(b"", timeout=1)
        assert refused.value.code() in (
            Code.RESOURCE_EXHAUSTED,
            Code.DEADLINE_EXCEEDED,
        )  # or it waits for a stream
        for each in held:
            each.cancel()
        await until(lambda: nothing_is_left(f))


async def test_a_client_that_does_not_read_holds_little_and_harms_nobody():
    engine = FakeEngine(name="a")
    async with fleet(engine, settings=OWN) as f, dialled(f) as peer:
        peer.write(call(1, generate_request(100_000).SerializeToString()))
        await until(lambda: any(c._streams for c in f.router._server._connections))
        (served,) = (s for c in f.router._server._connections for s in c._streams.values())
        await until(lambda: len(served.unsent) > 0)
        await asyncio.sleep(0.3)
        assert 0 < len(served.unsent) < 128 << 10, "its handler waits"
        await answered(f)
        peer.write(frames.window_update(0, 1 << 30), frames.window_update(1, 1 << 30))
        await until(lambda: not served.unsent)
        peer.write(frames.reset(1, frames.CANCEL))
        await until(lambda: nothing_is_left(f))


async def test_streams_that_are_reset_at_once_leave_nothing():
    engine = FakeEngine(name="a", delay=60)
    async with fleet(engine, settings=OWN) as f, dialled(f) as peer:
        for stream in range(1, 2001, 2):
            peer.write(call(stream, REQUEST), frames.reset(stream, frames.CANCEL))
        await answered_elsewhere(f, engine)
        await until(lambda: nothing_is_left(f) and not f.router._server._tasks)


async def answered_elsewhere(f: Fleet, engine: FakeEngine) -> None:
    info = await f.channel.unary_unary(path("HealthCheck"))(b"", timeout=10)
    assert info is not None


async def test_cancels_at_random_moments_leave_nothing_behind(monkeypatch):
    own = replace(OWN, admission=AdmissionSettings(engine_slots=24))
    monkeypatch.setattr("tests.cluster.test_router_cancels.FEW", own)
    await many_cancels(300, 60)


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls(tmp_path: Path, mutual: bool):
    authority = Authority(tmp_path)
    ours, theirs = authority.sign("router"), authority.sign("client")
    tls = ServerTls(
        certificate=str(ours.certificate), key=str(ours.key), client_ca=str(authority.ca) if mutual else None
    )
    engine = await FakeEngine(name="a").start()
    router = await serve_router(router_fakes.ListSource(router_fakes.endpoint(engine)), settings=OWN, tls=tls)
    try:
        await router.wait_ready(10)
        pair = (theirs.key.read_bytes(), theirs.certificate.read_bytes()) if mutual else (None, None)
        known = grpc.ssl_channel_credentials(authority.ca.read_bytes(), *pair)
        async with grpc.aio.secure_channel(router.address, known) as channel:
            stub = router_fakes.vllm_engine_pb2_grpc.VllmEngineStub(channel)
            assert await tokens_of(stub.Generate(generate_request(2))) == [6, 7]
        strangers = [grpc.aio.insecure_channel(router.address)]
        if mutual:
            unknown = grpc.ssl_channel_credentials(authority.ca.read_bytes())
            strangers.append(grpc.aio.secure_channel(router.address, unknown))
        for channel in strangers:
            async with channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(path("HealthCheck"))(b"", timeout=5)
                assert refused.value.code() is Code.UNAVAILABLE
    finally:
        await router.close(0.0)
        await engine.stop()


async def test_it_ends_with_its_streams_and_refuses_new_ones():
    engine = FakeEngine(name="a", delay=0.05)
    async with fleet(engine, settings=OWN) as f:
        running = asyncio.create_task(tokens_of(f.stub.Generate(generate_request(10))))
        await until(lambda: engine.seen)
        closing = asyncio.create_task(f.router.close(10))
        assert len(await running) == 10
        await closing
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await f.channel.unary_unary(path("HealthCheck"))(b"", timeout=5)
        assert refused.value.code() is Code.UNAVAILABLE


_KINDS = st.integers(0, 12)
_FRAMES = st.builds(
    lambda kind, flags, stream, payload: frames.frame(kind, flags, stream, payload),
    _KINDS,
    st.integers(0, 255),
    st.integers(0, 9),
    st.binary(max_size=60),
)
_CALLS = st.builds(lambda stream: call(stream, REQUEST), st.sampled_from([1, 3, 5, 7]))
_SENT = st.lists(st.one_of(_FRAMES, _CALLS, st.binary(max_size=30)), max_size=12)


def test_no_frames_of_one_client_disturb_another():
    async def run(samples: list[list[bytes]]) -> None:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        engine = FakeEngine(name="a")
        async with fleet(engine, settings=OWN) as f:
            for parts in samples:
                async with dialled(f) as peer:
                    peer.write(*parts)
                    await asyncio.sleep(0)
                    if random.Random(len(parts)).random() < 0.5:
                        with suppress(OSError):  # the server may have closed it already
                            peer.writer.write_eof()
            await answered(f)
            await until(lambda: len(f.router._server._connections) == 1)
            await until(lambda: not f.router._server._tasks)
        assert not faults

    samples: list[list[bytes]] = []

    @hypothesis_settings(
        max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(parts=_SENT)
    def gather(parts: list[bytes]) -> None:
        samples.append(parts)

    gather()
    asyncio.run(run(samples))


def test_what_headers_say():
    pairs = [(b":method", b"POST"), (b":path", b"/a/B"), (b"content-type", b"application/grpc+proto")]
    made = read([*pairs, (b"grpc-timeout", b"250m"), (b"x", b"y"), (b"k-bin", b"AQI"), (b"te", b"trailers")])
    assert (made.path, made.timeout, made.refused) == ("/a/B", 0.25, 0)
    assert made.metadata == (("x", "y"), ("k-bin", b"\x01\x02"))
    assert [timeout_seconds(text) for text in ("1H", "2M", "3S", "5000m")] == [3600.0, 120.0, 3.0, 5.0]


@pytest.mark.slow
def test_the_routers_own_tests_pass_over_it():
    names = (
        "relay",
        "resume",
        "safety",
        "control",
        "cancels",
        "hedge",
        "split",
        "progress",
        "ranks",
        "pool",
        "processes",
    )
    files = [f"tests/cluster/test_router_{name}.py" for name in names]
    files += [f"tests/cluster/test_{name}.py" for name in ("fuzz_grpc", "lookaside", "telling")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n0",
        "-m",
        "not slow",
        *files,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NPUFLEET_TEST_FRONT": "http2"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]
