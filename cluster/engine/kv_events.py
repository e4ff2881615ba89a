"""An engine's KV events for any number of subscribers: one relay per engine, with a snapshot for each newcomer.

vLLM publishes the events of each data-parallel rank on a ZMQ socket with a replay socket beside it. The stock
servicer opens those sockets for each subscriber, who then hears only what happens from then on: a router that
starts, or starts again, would know nothing of a warm cache, and could not place the blocks whose parents it
never saw. This relay reads the sockets once, from the engine's start, keeps what the cache holds
(:mod:`kv_state`) and begins each subscription with it, in the ``KvSnapshotChunk`` form of the protocol.

A gap in a rank's numbers is filled from the replay socket. Where that fails, the rank's state is dropped and
every subscriber told so, since a cache that changed unseen is worth less than none. Of a hybrid model's groups
all are forwarded, with their kind and window, unlike the stock relay, which keeps full attention alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from smg_grpc_proto.generated import common_pb2
from smg_grpc_servicer.kv_relay import (
    Normalizer,
    RankSource,
    RelayFailure,
    decode_batch,
    replay_frames,
)
from smg_grpc_servicer.load_record import LOAD_TICK, LoadRecorder

from .kv_state import RankState

logger = logging.getLogger(__name__)

_WAITING_BATCHES = 4096  # of one subscriber; more means that it does not keep up
_REPLAY_TIMEOUT_S = 5.0

LoadSource = Callable[[int | None], "common_pb2.EngineLoad | None"]


class AllGroups(Normalizer):
    """The stock normalization without its choice of groups: the index knows windows itself."""

    def _admit(self, event: Any, rank: int, event_id: int, learn_group: bool) -> Any:
        group, event.group_idx = event.group_idx, None
        try:
            return super()._admit(event, rank, event_id, learn_group)
        finally:
            event.group_idx = group


class SlowSubscriber(Exception):
    """A subscriber that did not keep up; it must begin again."""


class KvEventHub:
    """Relays one engine's events. All methods belong to the event loop in which :meth:`start` ran."""

    def __init__(
        self, sources: Iterable[RankSource], load: LoadSource | None = None, topic: str = ""
    ) -> None:
        self._sources = list(sources)
        self._topic = topic
        self._states = {source.rank: RankState() for source in self._sources}
        self._normalizer = AllGroups()
        self._recorder = LoadRecorder.optional(load)
        self._subscribers: set[asyncio.Queue[common_pb2.KvEventBatch | None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to read; before the engine's first request, so that nothing is missed."""
        reads = [self._read(source) for source in self._sources]
        self._tasks = [asyncio.create_task(job, name="KV events") for job in (*reads, self._tell_loads())]

    async def close(self) -> None:
        """End all subscriptions and the relay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for queue in list(self._subscribers):
            self._end(queue)

    def blocks(self) -> int:
        """Blocks that the engine's cache holds, of all ranks and groups."""
        return sum(len(state) for state in self._states.values())

    async def subscribe(self) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """The state now, then what happens. Raises :class:`SlowSubscriber`; ends when the hub closes."""
        queue: asyncio.Queue[common_pb2.KvEventBatch | None] = asyncio.Queue(_WAITING_BATCHES + 1)
        parts = [part for rank, state in self._states.items() for part in state.snapshot(rank)]
        self._subscribers.add(queue)  # in the same turn of the loop: no batch falls between
        try:
            for part in parts:
                yield part
            while (batch := await queue.get()) is not None:
                yield batch
            if queue not in self._subscribers and self._tasks and not self._tasks[0].done():
                raise SlowSubscriber(f"the subscriber left {_WAITING_BATCHES} batches of KV events waiting")
        finally:
            self._subscribers.discard(queue)

    def _end(self, queue: asyncio.Queue[common_pb2.KvEventBatch | None]) -> None:
        self._subscribers.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)

    def _tell(self, batch: common_pb2.KvEventBatch) -> None:
        """Hand ``batch`` to every subscriber, with the load unless it brings one."""
        if self._recorder is not None and not batch.HasField("load"):
            batch = self._recorder.stamp(batch)
        for queue in list(self._subscribers):
            if queue.qsize() >= _WAITING_BATCHES:
                self._end(queue)
            else:
                queue.put_nowait(batch)

    async def _tell_loads(self) -> None:
        """Loads that changed without an event."""
        while self._recorder is not None:
            await asyncio.sleep(LOAD_TICK)
            if self._subscribers and (beat := self._recorder.heartbeat()) is not None:
                self._tell(beat)

    async def _read(self, source: RankSource) -> None:
        import zmq
        import zmq.asyncio

        context = zmq.asyncio.Context.instance()
        socket = context.socket(zmq.SUB)
        try:
            socket.subscribe(self._topic.encode())
            socket.connect(source.endpoint)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) >= 3 and len(frames[1]) == 8:
                    await self._take(source, int.from_bytes(frames[1], "big"), frames[2])
        finally:
            socket.close(linger=0)

    async def _take(self, source: RankSource, sequence: int, payload: bytes) -> None:
        state = self._states[source.rank]
        if sequence > state.sequence + 1:
            await self._replay(source, state.sequence + 1, sequence)
        if sequence <= state.sequence:
            if sequence == 0:
                logger.warning("the publisher of rank %d started over", source.rank)
                self._lost(source.rank, -1)
            else:
                return  # the replay ran past it
        self._forward(source.rank, sequence, payload)

    async def _replay(self, source: RankSource, first: int, next_one: int) -> None:
        if source.replay_endpoint is None:
            self._lost(source.rank, next_one - 1)
            return
        try:
            async with aclosing(
                replay_frames(source.replay_endpoint, first, timeout=_REPLAY_TIMEOUT_S)  # type: ignore[type-var]
            ) as frames:
                async for sequence, payload in frames:
                    self._forward(source.rank, sequence, payload)
        except RelayFailure as error:
            logger.warning("KV events of rank %d are lost: %s", source.rank, error)
            self._lost(source.rank, max(next_one - 1, self._states[source.rank].sequence))

    def _forward(self, rank: int, sequence: int, payload: bytes) -> None:
        try:
            batch = self._normalizer.normalize_batch(decode_batch(payload), sequence, rank)
        except (ValueError, TypeError) as error:  # msgspec's errors are ValueErrors
            logger.warning("KV event batch %d of rank %d cannot be read: %s", sequence, rank, error)
            self._lost(rank, sequence)
            return
        self._states[rank].take(batch)
        self._tell(batch)

    def _lost(self, rank: int, sequence: int) -> None:
        """Drop what is known of the rank, and tell; the next batch is ``sequence`` + 1."""
        state = self._states[rank] = RankState()
        state.sequence = sequence
        for part in state.snapshot(rank):
            self._tell(part)
