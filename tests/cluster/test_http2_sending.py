"""Windows of an HTTP/2 peer against what is sent: never more than it takes, all of it once it takes enough."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.sending import Sender


class Loop:
    """Runs what is due when the test says so."""

    def __init__(self) -> None:
        self.due: list[Any] = []

    def call_soon(self, what: Any) -> None:
        self.due.append(what)

    def turn(self) -> None:
        due, self.due = self.due, []
        for what in due:
            what()


class Body:
    """One stream's body and the window that its peer counts."""

    closes = True

    def __init__(self, stream_id: int, size: int) -> None:
        self.stream_id = stream_id
        self.whole = bytes((stream_id + at) % 251 for at in range(size))
        self.unsent = memoryview(self.whole)
        self.send_window = 0
        self.sent = self.window = 0
        self.came = bytearray()
        self.ended = False

    def on_sent(self) -> None:
        self.sent += 1


class Peer:
    """The other end: a transport that counts as RFC 9113 (6.9) does."""

    def __init__(self) -> None:
        self.bodies: dict[int, Body] = {}
        self.window = self.initial = frames.DEFAULT_WINDOW

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            packed, flags, stream = frames.HEAD.unpack_from(data, at)
            size = packed >> 8
            payload = data[at + 9 : at + 9 + size]
            at += 9 + size
            if packed & 0xFF != frames.DATA:
                continue
            body = self.bodies[stream]
            self.window -= size
            body.window -= size
            assert self.window >= 0 and body.window >= 0 and not body.ended
            body.came += payload
            body.ended = bool(flags & frames.END_STREAM)


NUMBERS = st.sampled_from([1, 3, 5, 7])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), NUMBERS, st.integers(1, 40_000)),
        st.tuples(st.just("initial"), st.integers(0, 70_000)),
        st.tuples(st.just("widen"), st.integers(1, 50_000)),
        st.tuples(st.just("widen one"), NUMBERS, st.integers(1, 30_000)),
        st.tuples(st.just("forget"), NUMBERS),
        st.tuples(st.just("pause")),
        st.tuples(st.just("resume")),
        st.tuples(st.just("turn")),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(steps=STEPS)
def test_bodies_keep_to_windows_that_move_and_all_arrive(steps: list[tuple[Any, ...]]):
    loop, peer = Loop(), Peer()
    sender = Sender(loop)  # type: ignore[arg-type]
    sender.open(peer)  # type: ignore[arg-type]
    free = iter(range(9, 10_000, 2))
    numbers: dict[int, int] = {}  # of a step -> the stream that runs under it

    def settle() -> None:
        if sender.moved:
            sender.settle(peer.bodies.values())
        loop.turn()

    for what, *values in steps:
        if what == "start":
            stream = numbers[values[0]] = next(free)
            body = peer.bodies[stream] = Body(stream, values[1])
            body.window = peer.initial
            sender.start(body, b"")
        elif what == "initial":
            settle()  # what was written before a smaller window came may go beyond it
            for body in peer.bodies.values():
                body.window += values[0] - peer.initial
            peer.initial = values[0]
            sender.apply(frames.INITIAL_WINDOW_SIZE, values[0])
        elif what == "widen":
            peer.window += values[0]
            sender.widen(values[0])
        elif what == "widen one" and values[0] in numbers:
            body = peer.bodies[numbers[values[0]]]
            body.window += values[1]
            sender.widen_stream(body, values[1])
        elif what == "forget" and values[0] in numbers:
            settle()  # what is on its way to the peer counts there
            sender.forget(peer.bodies.pop(numbers.pop(values[0])))
        elif what == "pause":
            sender.paused = True
        elif what == "resume":
            sender.paused = False
            sender.pump()
        elif what == "turn":
            settle()
    sender.paused = False
    peer.window += 1 << 24
    sender.widen(1 << 24)
    for body in peer.bodies.values():
        body.window += 1 << 17
        sender.widen_stream(body, 1 << 17)
    settle()
    for body in peer.bodies.values():
        assert bytes(body.came) == body.whole and body.ended and body.sent == 1
