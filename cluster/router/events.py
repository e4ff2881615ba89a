"""Follow the KV events of each engine, and the loads that come with them.

One stream per engine, kept open while the router reaches it. A stream begins with what the engine's cache
holds (a snapshot, from engines that serve one), so a router that starts late knows as much as one that was
there all along. When a stream ends for whatever reason, what was known of that engine is dropped at once: a
cache that may have changed unseen is worth less than none. An engine that offers no events is asked again
only after a long while.
"""

from __future__ import annotations

import asyncio
import logging

import grpc
from smg_grpc_proto.generated import common_pb2

from npufleet.cluster.router.decider import Decider
from npufleet.cluster.router.member import Member, MemberState
from npufleet.cluster.router.pool import EnginePool
from npufleet.cluster.router.prefix.index import PrefixIndex
from npufleet.cluster.router.prefix.wire import apply, load_of
from npufleet.cluster.router.wire import path

_log = logging.getLogger(__name__)
_RETRY = 0.5
_ASK_AGAIN = 60.0  # an engine without events
_FOREVER = 10 * 365 * 86400.0
_PUSH_LAG = 0.1  # how long before its arrival a pushed load counts as asked for, seconds
_AT_A_TIME = 64  # events between two turns of the loop


class EventFollowers:
    """The streams of all engines of a pool."""

    def __init__(self, pool: EnginePool, decider: Decider) -> None:
        self._pool = pool
        self._decider = decider
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._models: dict[str, str] = {}
        self._ranks: dict[str, tuple[str, ...]] = {}
        self.following: set[str] = set()  # engine ids whose events arrive
        pool.listen(self._update)

    def close(self) -> None:
        """End all streams."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    def _update(self) -> None:
        """The pool changed: follow new engines, forget those that left."""
        members = {member.engine_id: member for member in self._pool.members()}
        for engine_id in [known for known in self._models if known not in members]:
            task = self._tasks.pop(engine_id, None)
            if task is not None:
                task.cancel()
            model = self._models.pop(engine_id)
            for rank_id in self._ranks.pop(engine_id):
                self._decider.forget(model, rank_id)
        for engine_id, member in members.items():
            model = self._models.setdefault(engine_id, member.endpoint.model)
            self._ranks.setdefault(engine_id, member.endpoint.rank_ids)
            index = self._decider.index(model)
            if index is not None and engine_id not in self._tasks and member.state is MemberState.READY:
                task = asyncio.create_task(self._follow(member, index), name=f"router events {engine_id}")
                self._tasks[engine_id] = task
                task.add_done_callback(_report_crash)

    async def _follow(self, member: Member, index: PrefixIndex) -> None:
        while True:
            pause = _RETRY
            try:
                await self._read(member, index)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    _log.info("engine %s offers no KV events: %s", member.engine_id, error.details())
                    pause = _ASK_AGAIN
                else:
                    _log.debug("engine %s: KV events ended: %s", member.engine_id, error.code().name)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # else the link was closed under the call; a new one may come
            finally:
                self.following.discard(member.engine_id)
                for ledger in member.ledgers:
                    index.drop(ledger.engine_id)
            await asyncio.sleep(pause)

    async def _read(self, member: Member, index: PrefixIndex) -> None:
        ask = common_pb2.SubscribeKvEventsRequest(load_records_before_first_batch=True)
        call = member.channel.unary_stream(path("SubscribeKvEvents"))(
            ask.SerializeToString(), timeout=_FOREVER
        )
        numbers: dict[int, int] = {}
        applied = 0
        try:
            while (raw := await call.read()) is not grpc.aio.EOF:
                batch = common_pb2.KvEventBatch.FromString(raw)
                self.following.add(member.engine_id)
                report = load_of(batch)
                ledger = member.ledger_of(batch.dp_rank)
                if ledger is None:
                    continue
                if report is not None and (ledger.rank is not None or not batch.dp_rank):
                    lag = _PUSH_LAG + batch.load.age_ms / 1000
                    ledger.take(report, ledger.mark_before(lag))
                if batch.load.load_only:
                    continue
                if not _in_order(numbers, batch):
                    _log.warning("engine %s: KV events are missing; starting over", member.engine_id)
                    return
                apply(index, ledger.engine_id, batch)
                applied += len(batch.events)
                if applied >= _AT_A_TIME:  # a snapshot of a large cache must not hold up requests
                    applied = 0
                    await asyncio.sleep(0)
        finally:
            call.cancel()


def _in_order(numbers: dict[int, int], batch: common_pb2.KvEventBatch) -> bool:
    """Whether nothing is missing before ``batch``.

    A snapshot's chunks bring numbers of their own. One numbered 0 may stand for a cache before its first event,
    so the next batch may be 0 as well as 1.
    """
    before = numbers.get(batch.dp_rank)
    if batch.HasField("snapshot"):
        numbers.pop(batch.dp_rank, None)
        if batch.sequence_number:
            numbers[batch.dp_rank] = batch.sequence_number
        return True
    numbers[batch.dp_rank] = batch.sequence_number
    return before is None or batch.sequence_number == before + 1


def _report_crash(task: asyncio.Task[None]) -> None:
    """A loop that ends by itself is a defect of ours; without this it would end silently."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s stopped", task.get_name(), exc_info=error)
