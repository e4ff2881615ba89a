"""Our HTTP/2 client against a peer written frame by frame: what the protocol allows, and what breaks it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from npufleet.cluster.transport.base import LinkSettings
from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.channel import Http2Channel
from npufleet.cluster.transport.http2.headers import timeout_text

from .http2_peer import PATH, QUICK, Peer, against, answer, begin, data, headers, trailers

Code = grpc.StatusCode


async def stream(channel: Http2Channel, request: bytes = b"hello", **kwargs: Any) -> list[bytes]:
    return [message async for message in channel.unary_stream(PATH)(request, **kwargs)]


async def error_of(awaitable: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value


def says(*parts: bytes, settings: dict[int, int] | None = None):
    """A peer that answers the first request with ``parts`` and then keeps reading."""

    async def script(peer: Peer) -> None:
        await peer.open(settings)
        await peer.until(frames.HEADERS)
        peer.write(*parts)
        while True:
            await peer.frame()

    return script


async def test_padding_priority_and_continuation_are_understood():
    block = headers(1, [(":status", "200"), ("content-type", "application/grpc"), ("x-a", "b")])[9:]
    flags = frames.PADDED | frames.PRIORITIZED
    first = frames.frame(frames.HEADERS, flags, 1, b"\x03" + b"\0" * 5 + block[:4] + b"\0\0\0")
    rest = [frames.frame(frames.CONTINUATION, 0, 1, block[4:9])]
    rest.append(frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[9:]))
    padded = frames.frame(frames.DATA, frames.PADDED, 1, b"\x04" + b"\0\0\0\0\x02ab" + b"\0" * 4)
    async with against(says(first, *rest, padded, data(1, b"c", b"", b"d"), trailers(1))) as channel:
        call = channel.unary_stream(PATH)(b"")
        assert [m async for m in call] == [b"ab", b"c", b"", b"d"]
        assert tuple(await call.initial_metadata()) == (("x-a", "b"),)


async def test_a_message_may_come_byte_by_byte():
    whole = answer(1, b"x" * 300, b"y")

    async def script(peer: Peer) -> None:
        await peer.open()
        await peer.until(frames.HEADERS)
        for at in range(0, len(whole), 7):
            peer.write(whole[at : at + 7])
            await peer.writer.drain()
            await asyncio.sleep(0)
        await peer.frame()

    async with against(script) as channel:
        assert await stream(channel) == [b"x" * 300, b"y"]


async def test_a_body_waits_for_the_peers_windows():
    body = bytes(range(256)) * 2000  # 512,000 bytes
    got = bytearray()

    async def script(peer: Peer) -> None:
        await peer.open({frames.INITIAL_WINDOW_SIZE: 1000, frames.MAX_FRAME_SIZE: 20_000})
        while True:
            kind, flags, number, payload = await peer.frame()
            if kind != frames.DATA:
                continue
            assert len(payload) <= 20_000
            got.extend(payload)
            if flags & frames.END_STREAM:
                break
            peer.write(frames.window_update(number, len(payload)), frames.window_update(0, len(payload)))
            if len(got) == 1000:  # the window of running streams moves with the setting
                peer.write(frames.settings({frames.INITIAL_WINDOW_SIZE: 30_000}))
        peer.write(answer(1, b"done"))
        await peer.until(frames.GOAWAY)

    async with against(script) as channel:
        assert await stream(channel, body) == [b"done"]
    assert bytes(got[5:]) == body


async def test_bodies_that_share_a_window_take_turns():
    order: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.open({frames.INITIAL_WINDOW_SIZE: 1 << 20})
        seen = 0
        while seen < 2:
            kind, flags, number, payload = await peer.frame()
            if kind != frames.DATA:
                continue
            order.append(number)
            seen += bool(flags & frames.END_STREAM)
            peer.write(frames.window_update(0, len(payload)))
            if flags & frames.END_STREAM:
                peer.write(answer(number, b"ok"))
        await peer.until(frames.GOAWAY)

    async with against(script) as channel:
        await asyncio.gather(*(stream(channel, b"z" * 300_000) for _ in range(2)))
    last_of_first = max(i for i, number in enumerate(order) if number == 1)
    assert order.index(3) < last_of_first, "the second body waited for the whole first one"


async def test_reading_gives_the_window_back_and_not_reading_does_not():
    """The peer may send a stream's window of what nobody reads, and then no more until it is read."""
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.open()
        await peer.until(frames.HEADERS)
        peer.write(begin(1))
        window = 256 << 10
        chunk = data(1, b"m" * 8000)
        while sent < 200:
            while window < len(chunk):
                _, number, payload = await peer.until(frames.WINDOW_UPDATE)
                window += int.from_bytes(payload, "big") if number == 1 else 0
            peer.write(chunk)
            window -= len(chunk) - 9
            sent += 1
        peer.write(trailers(1))
        await peer.until(frames.GOAWAY)

    async with against(script) as channel:
        call = channel.unary_stream(PATH)(b"")
        await call.initial_metadata()
        await asyncio.sleep(0.2)
        assert sent == (256 << 10) // 8005
        assert len([m async for m in call]) == 200


async def test_a_message_above_the_window_still_comes_in():
    big = b"B" * (600 << 10)

    async def script(peer: Peer) -> None:
        await peer.open()
        await peer.until(frames.HEADERS)
        peer.write(begin(1))
        rest, window = b"\0" + len(big).to_bytes(4, "big") + big, 256 << 10
        while rest:
            while window < 16_000:
                _, number, payload = await peer.until(frames.WINDOW_UPDATE)
                window += int.from_bytes(payload, "big") if number == 1 else 0
            piece, rest = rest[:16_000], rest[16_000:]
            peer.write(frames.frame(frames.DATA, 0, 1, piece))
            window -= len(piece)
        peer.write(trailers(1))
        await peer.until(frames.GOAWAY)

    async with against(script) as channel:
        assert await stream(channel) == [big]


async def test_calls_wait_for_a_free_stream():
    most = 0

    async def script(peer: Peer) -> None:
        nonlocal most
        await peer.open({frames.MAX_CONCURRENT_STREAMS: 2})
        running: list[int] = []
        for _ in range(6):
            _, number, _ = await peer.until(frames.HEADERS)
            running.append(number)
            most = max(most, len(running))
            await asyncio.sleep(0.02)
            if len(running) == 2:
                peer.write(*(answer(n, b"ok") for n in running))
                running.clear()
        await peer.until(frames.GOAWAY)

    async with against(script) as channel:
        answers = await asyncio.gather(*(stream(channel) for _ in range(6)))
        assert answers == [[b"ok"]] * 6
    assert most == 2


async def test_calls_beyond_the_queue_are_refused_and_cancelled_ones_leave_it():
    settings = LinkSettings(max_waiting=2)

    async def script(peer: Peer) -> None:
        await peer.open({frames.MAX_CONCURRENT_STREAMS: 1})
        await peer.until(frames.RST_STREAM)
        _, number, _ = await peer.until(frames.HEADERS)
        peer.write(answer(number, b"last"))
        await peer.until(frames.GOAWAY)

    async with against(script, settings=settings) as channel:
        first = channel.unary_stream(PATH)(b"")
        waiting = [channel.unary_stream(PATH)(b"")]
        await asyncio.sleep(0.05)
        waiting.append(channel.unary_stream(PATH)(b""))
        error = await error_of(channel.unary_stream(PATH)(b"").read())
        assert error.code() is Code.RESOURCE_EXHAUSTED
        waiting[0].cancel()
        first.cancel()
        assert await waiting[1].read() == b"last"


async def test_after_goaway_running_calls_end_where_they_are_and_new_ones_go_to_a_new_connection():
    release = asyncio.Event()

    async def old(peer: Peer) -> None:
        await peer.open()
        await peer.until(frames.HEADERS)
        await peer.until(frames.HEADERS)
        peer.write(begin(1), data(1, b"one"), frames.goaway(1, 0))  # stream 3 was not looked at
        await release.wait()
        peer.write(data(1, b"two"), trailers(1))
        await peer.frame()

    async def new(peer: Peer) -> None:
        await peer.open()
        while True:
            _, number, _ = await peer.until(frames.HEADERS)
            peer.write(answer(number, b"new"))

    async with against(old, new) as channel:
        running = channel.unary_stream(PATH)(b"a")
        unheard = channel.unary_stream(PATH)(b"b")
        assert await running.read() == b"one"
        assert await unheard.read() == b"new"
        assert await stream(channel) == [b"new"]
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        release.set()
        assert [m async for m in running] == [b"two"]


async def test_a_refused_stream_starts_over_once():
    async def script(peer: Peer) -> None:
        await peer.open()
        while True:
            _, number, _ = await peer.until(frames.HEADERS)
            peer.write(frames.reset(number, frames.REFUSED_STREAM))

    async with against(script) as channel:
        error = await error_of(stream(channel))
        assert error.code() is Code.UNAVAILABLE and "before it looked" in error.details()


async def test_a_refused_request_above_the_window_goes_out_whole_the_second_time():
    body = bytes(100_000)

    async def script(peer: Peer) -> None:
        await peer.open()
        _, number, _ = await peer.until(frames.HEADERS)
        peer.write(frames.reset(number, frames.REFUSED_STREAM), frames.window_update(0, 1 << 20))
        while (await peer.until(frames.HEADERS))[1] == number:
            pass
        came, flags = 0, 0
        while not flags & frames.END_STREAM:
            flags, again, payload = await peer.until(frames.DATA)
            if again != number:
                came += len(payload)
                peer.write(frames.window_update(again, len(payload)))
        peer.write(answer(again, str(came).encode()))

    async with against(script) as channel:
        assert await stream(channel, body, timeout=20) == [b"100005"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (frames.NO_ERROR, Code.INTERNAL),
        (frames.CANCEL, Code.CANCELLED),
        (frames.ENHANCE_YOUR_CALM, Code.RESOURCE_EXHAUSTED),
        (frames.INADEQUATE_SECURITY, Code.PERMISSION_DENIED),
        (0xDEAD, Code.INTERNAL),
    ],
)
async def test_a_reset_becomes_the_status_that_grpc_names(error: int, code: grpc.StatusCode):
    async with against(says(begin(1), frames.reset(1, error))) as channel:
        assert (await error_of(stream(channel))).code() is code


@pytest.mark.parametrize(
    ("parts", "code", "text"),
    [
        ([headers(1, [(":status", "503")], ends=True)], Code.UNAVAILABLE, "HTTP 503"),
        (
            [headers(1, [(":status", "404")]), frames.frame(0, 0, 1, b"<html>")],
            Code.UNIMPLEMENTED,
            "HTTP 404",
        ),
        ([headers(1, [(":status", "200"), ("content-type", "text/html")])], Code.UNKNOWN, "text/html"),
        ([begin(1), headers(1, [("x", "y")], ends=True)], Code.UNKNOWN, "without a gRPC status"),
        ([begin(1), frames.frame(0, frames.END_STREAM, 1, b"")], Code.UNKNOWN, "without a gRPC status"),
        (
            [begin(1), frames.frame(0, 0, 1, b"\0\0\0\0\x09abc"), trailers(1)],
            Code.INTERNAL,
            "within a message",
        ),
        ([begin(1), frames.frame(0, 0, 1, b"\1\0\0\0\1a")], Code.INTERNAL, "compressed"),
        ([begin(1), frames.frame(0, 0, 1, b"\0\x7f\xff\xff\xffa")], Code.RESOURCE_EXHAUSTED, "limit"),
        ([begin(1), trailers(1, 99)], Code.UNKNOWN, ""),
        ([begin(1), trailers(1, 5, "no%20such%C3%A9%")], Code.NOT_FOUND, "no suché%"),
        ([frames.frame(0, 0, 1, b"\0\0\0\0\0")], Code.INTERNAL, "data before headers"),
        ([begin(1), begin(1)], Code.INTERNAL, "in the middle"),
        ([begin(1), frames.window_update(1, 0)], Code.INTERNAL, "window update of 0"),
        ([begin(1), headers(1, [("x-long", "v" * 20_000)], ends=True)[:9]], Code.UNAVAILABLE, "frame of"),
    ],
)
async def test_an_answer_that_is_wrong_ends_its_call(parts: list[bytes], code: grpc.StatusCode, text: str):
    async with against(says(*parts)) as channel:
        error = await error_of(stream(channel))
        assert error.code() is code and text in error.details()


async def test_an_informational_answer_is_skipped_and_a_unary_call_takes_one_message():
    async with against(says(headers(1, [(":status", "103")]), answer(1, b"x"))) as channel:
        assert await channel.unary_unary(PATH)(b"") == b"x"
    async with against(says(answer(1, b"x", b"y"))) as channel:
        assert (await error_of(channel.unary_unary(PATH)(b""))).code() is Code.INTERNAL


async def test_metadata_above_the_limit_ends_its_call_alone():
    long = [(":status", "200"), ("content-type", "application/grpc"), ("x", "v" * 9000), ("y", "v" * 9000)]
    block = headers(1, long)[9:]
    cut = [frames.frame(frames.HEADERS, 0, 1, block[:10_000])]
    cut.append(frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[10_000:]))

    async def script(peer: Peer) -> None:
        await peer.open()
        await peer.until(frames.HEADERS)
        await peer.until(frames.HEADERS)
        peer.write(*cut, answer(3, b"well"))
        await peer.until(frames.GOAWAY)

    async with against(script) as channel:
        bad, good = channel.unary_stream(PATH)(b""), channel.unary_stream(PATH)(b"")
        assert (await error_of(bad.read())).code() is Code.RESOURCE_EXHAUSTED
        assert await good.read() == b"well"


@pytest.mark.parametrize(
    "parts",
    [
        [frames.frame(frames.PUSH_PROMISE, frames.END_HEADERS, 1, b"\0\0\0\2")],
        [frames.frame(frames.HEADERS, 0, 1, b"\x88"), frames.frame(frames.PING, 0, 0, b"12345678")],
        [frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"")],
        [frames.frame(frames.HEADERS, 0, 1, b"\x88")] + [frames.frame(frames.CONTINUATION, 0, 1, b"")] * 3,
        [frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xbe")],  # a table that has nothing
        [frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x3f\xe1\x1f\x88")],  # a table of 4,096
        [frames.frame(frames.DATA, frames.PADDED, 1, b"\x09abc")],
        [frames.frame(frames.DATA, 0, 2, b"")],
        [frames.frame(frames.DATA, 0, 7, b"")],
        [frames.frame(frames.PING, 0, 0, b"short")],
        [frames.frame(frames.RST_STREAM, 0, 1, b"\0")],
        [frames.frame(frames.SETTINGS, 0, 0, b"12345")],
        [frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31})],
        [frames.settings({frames.MAX_FRAME_SIZE: 1})],
        [frames.window_update(0, 0)],
        [frames.window_update(0, 2**31 - 1)],
        [frames.frame(frames.GOAWAY, 0, 0, b"\0")],
        [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
    ],
)
async def test_a_peer_that_breaks_the_protocol_loses_the_connection_and_the_next_one_works(
    parts: list[bytes],
):
    told: list[int] = []

    async def bad(peer: Peer) -> None:
        await peer.open()
        await peer.until(frames.HEADERS)
        peer.write(*parts)
        _, _, payload = await peer.until(frames.GOAWAY)
        told.append(int.from_bytes(payload[4:8], "big"))

    async def good(peer: Peer) -> None:
        await peer.open()
        _, number, _ = await peer.until(frames.HEADERS)
        peer.write(answer(number, b"ok"))
        await peer.until(frames.GOAWAY)

    async with against(bad, good) as channel:
        error = await error_of(stream(channel))
        assert error.code() is Code.UNAVAILABLE
        assert await stream(channel) == [b"ok"]
    assert told and told[0] != frames.NO_ERROR


async def test_a_flood_of_settings_or_pings_is_bounded():
    """A peer that asks for answers and never reads them is dropped before they fill the memory."""

    async def script(peer: Peer) -> None:
        await peer.open()
        await peer.until(frames.HEADERS)
        ping = frames.frame(frames.PING, 0, 0, b"12345678") * 4096
        while not peer.writer.is_closing():
            peer.write(ping)
            await peer.writer.drain()

    async with against(script) as channel:
        error = await error_of(stream(channel, timeout=15))
        assert error.code() is Code.UNAVAILABLE


async def test_a_silent_peer_is_pinged_and_then_given_up():
    settings = LinkSettings(keepalive_time=0.1, keepalive_timeout=0.1, reconnect_backoff=0.1)
    pings = 0

    async def script(peer: Peer) -> None:
        nonlocal pings
        await peer.open()
        await peer.until(frames.HEADERS)
        for _ in range(3):
            _, _, payload = await peer.until(frames.PING)
            pings += 1
            peer.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        await asyncio.sleep(60)

    async with against(script, settings=settings) as channel:
        error = await error_of(stream(channel))
        assert error.code() is Code.UNAVAILABLE and "ping" in error.details()
    assert pings == 3


async def test_no_settings_no_connection():
    async def mute(peer: Peer) -> None:
        await peer.until(frames.GOAWAY)

    async with against(mute, settings=LinkSettings(connect_timeout=0.2)) as channel:
        error = await error_of(stream(channel))
        assert error.code() is Code.UNAVAILABLE and "within 0.2 s" in error.details()
        again = await error_of(stream(channel))  # while it cannot be reached: at once
        assert again.code() is Code.UNAVAILABLE


async def test_ids_run_out_and_the_next_connection_goes_on():
    async def script(peer: Peer) -> None:
        await peer.open()
        while True:
            _, number, _ = await peer.until(frames.HEADERS)
            peer.write(answer(number, number.to_bytes(4, "big")))

    async with against(script) as channel:
        assert await stream(channel) == [(1).to_bytes(4, "big")]
        assert channel._connection is not None
        channel._connection._next_id = 2**31 - 1
        assert await stream(channel) == [(2**31 - 1).to_bytes(4, "big")]
        assert await stream(channel) == [(1).to_bytes(4, "big")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0u"),
        (0.0000015, "2u"),
        (1.0, "1000000u"),
        (100.0, "100000m"),
        (3600.0, "3600000m"),
        (200_000.0, "200000S"),
        (315_360_000.0, "5256000M"),
        (1e12, "99999999H"),
    ],
)
def test_timeouts_fit_eight_digits(seconds: float, text: str):
    assert timeout_text(seconds) == text


frame_strategy = st.builds(
    frames.frame,
    st.integers(0, 12),
    st.sampled_from([0, 1, 4, 5, 8, 9, 0x2D, 0xFF]),
    st.sampled_from([0, 1, 2, 3, 5, 99]),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([begin(1)[9:], trailers(1)[9:], data(1, b"ab", b"c")[9:], b"\0\0\0\1", b"\0" * 8]),
    ),
)


@hypothesis_settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(st.one_of(frame_strategy, st.binary(max_size=30)), max_size=12))
def test_whatever_a_peer_sends_each_call_ends_and_the_next_connection_works(parts: list[bytes]):
    """Fuzzed frames: a call ends with messages or a status, never hangs, and nothing leaks out of the protocol."""
    asyncio.run(_survives(parts))


async def _survives(parts: list[bytes]) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))

    async def wild(peer: Peer) -> None:
        await peer.open()
        await peer.until(frames.HEADERS)
        peer.write(*parts)
        peer.writer.write_eof()
        while True:
            await peer.frame()

    async def good(peer: Peer) -> None:
        await peer.open()
        while True:
            _, number, _ = await peer.until(frames.HEADERS)
            peer.write(answer(number, b"ok"))

    async with against(wild, good) as channel:
        calls = [channel.unary_stream(PATH)(b"x" * 20) for _ in range(3)]
        for call in calls:
            try:
                async with asyncio.timeout(5):
                    _ = [m async for m in call]
            except grpc.aio.AioRpcError:
                pass
        assert await stream(channel, wait_for_ready=True) == [b"ok"]
        assert QUICK.max_waiting > len(channel._waiting) == 0
    assert not faults
