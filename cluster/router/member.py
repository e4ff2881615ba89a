"""One engine as the router knows it: its channel, whether it may be picked, its load.

Three small loops run per engine: one follows the connection (a lost one is seen at once), one asks
grpc.health.v1 whether the engine serves, one asks GetLoads. A health answer that is late is not a dead
engine: a busy one may miss a few; a refused or broken call is believed at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial

import grpc

from npufleet.cluster.endpoints import EngineEndpoint, EngineState
from npufleet.cluster.router.base import EngineLoad
from npufleet.cluster.router.errors import BROKE, LOST
from npufleet.cluster.router.ledger import Ledger, Mark, Peers
from npufleet.cluster.router.lookaside.signed import SignedChannel
from npufleet.cluster.router.lookaside.tokens import TokenMint
from npufleet.cluster.router.probe import HealthProbe, sum_loads
from npufleet.cluster.router.progress import Breaker, Progress
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.wire import path, pb
from npufleet.cluster.transport.base import EngineChannel
from npufleet.cluster.transport.closed import closed_is_unavailable
from npufleet.cluster.transport.registry import open_channel

_log = logging.getLogger(__name__)
_SHORTEST_HOLD = 0.05
_LONGEST_HOLD = 10.0
_LIVES = itertools.count(1)


class MemberState(StrEnum):
    """Whether an engine may be picked: only READY ones are."""

    STARTING = "starting"  # the controller says that it is not ready yet
    CONNECTING = "connecting"  # never reached by this router so far
    READY = "ready"
    SUSPECT = "suspect"  # it was ready; the connection or a health check failed
    DRAINING = "draining"  # takes no new request, running ones end


class Member:
    """One engine. ``on_change(member, old_state, reason)`` is called after each change of state."""

    def __init__(
        self,
        endpoint: EngineEndpoint,
        settings: RouterSettings,
        on_change: Callable[[Member, MemberState, str], None],
        spare: Callable[[Member], bool] = lambda member: True,
        peers: Peers | None = None,
    ) -> None:
        """``spare(member)``: another engine could take its requests, so it may rest after errors. ``peers`` are
        further routers over this engine.
        """
        self.endpoint = endpoint
        self.channel: EngineChannel = open_channel(
            settings.transport, endpoint.address, settings.link(), settings.tls
        )
        if settings.secret is not None:
            self.channel = SignedChannel(self.channel, TokenMint(settings.secret))
        self.ledgers = tuple(  # one for each data-parallel rank
            Ledger(
                name,
                others=None if peers is None else partial(peers.others, name),
                tell=None if peers is None else partial(peers.tell, name),
                rank=rank if endpoint.ranks > 1 else None,
            )
            for rank, name in enumerate(endpoint.rank_ids)
        )
        self._settings = settings
        self._on_change = on_change
        self._spare = spare
        self._progress = Progress(settings.stall_timeout, settings.first_stall_timeout)
        self._breaker = Breaker(settings.breaker_failures)
        self.life = 0  # another one each time that it is found serving: it may be another process then
        self.heard = self._progress.heard  # to be called with each message of a request
        self._reached = False
        self._reached_once = False
        self._leaving = False
        self._rounds = 0  # times in a row that it was back and a request on it found it unavailable
        self._last_state = self.state
        self._wake = asyncio.Event()  # ask for its health now
        self._idle = asyncio.Event()  # it leaves and its last request has ended
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def engine_id(self) -> str:
        """The engine's id, unique per life of the engine."""
        return self.endpoint.engine_id

    @property
    def state(self) -> MemberState:
        """What the controller wishes and what this router sees, taken together."""
        if self._leaving or self.endpoint.state is EngineState.DRAINING:
            return MemberState.DRAINING
        if self.endpoint.state is EngineState.STARTING:
            return MemberState.STARTING
        if self._reached:
            return MemberState.READY
        return MemberState.SUSPECT if self._reached_once else MemberState.CONNECTING

    @property
    def pickable(self) -> bool:
        """True where a new request may go to this engine."""
        return self._last_state is MemberState.READY

    @property
    def in_flight(self) -> int:
        """Requests of this router on all its ranks."""
        return sum(ledger.in_flight for ledger in self.ledgers)

    @property
    def queued(self) -> int:
        """Those of them without any output yet."""
        return sum(ledger.queued for ledger in self.ledgers)

    def loads(self) -> list[EngineLoad]:
        """The loads of its ranks now."""
        return [ledger.load(self._settings.load_ttl) for ledger in self.ledgers]

    def ledger_of(self, rank: int) -> Ledger | None:
        """The ledger of what calls itself ``rank``: an engine that is not split has one, whatever it is called."""
        if len(self.ledgers) == 1:
            return self.ledgers[0]
        return self.ledgers[rank] if rank < len(self.ledgers) else None

    def start(self) -> None:
        """Start the loops, in the running event loop."""
        loops = (
            self._follow_connection(),
            self._follow_health(),
            self._follow_load(),
            self._follow_progress(),
        )
        self._tasks = [asyncio.create_task(loop, name=f"router {self.engine_id}") for loop in loops]
        for task in self._tasks:
            task.add_done_callback(_report_crash)

    def update(self, endpoint: EngineEndpoint) -> None:
        """Take what the controller now says about this engine (same id, same address)."""
        self.endpoint = endpoint
        self._changed("the controller changed its state")

    def outcome(self, code: grpc.StatusCode) -> None:
        """A request on this engine ended with ``code``; its lease is already off the ledger."""
        if self._leaving and not self.in_flight:
            self._idle.set()
        if code in LOST:
            if self._reached:  # of the many that one broken connection ends, the first counts
                self._rounds += 1
            self._lost(f"a request failed with {code.name}")
        elif code in BROKE:
            self._wake.set()  # it may be the request's fault: let the health check decide, now
            if self._breaker.failed() and self._reached and self._spare(self):
                self._rounds += 1
                self._lost(f"one request after another failed, now with {code.name}")
        elif code is grpc.StatusCode.OK:
            self._rounds = 0
            self._breaker.succeeded()

    async def leave(self) -> None:
        """Take no more requests, let the running ones end within ``leave_timeout``, then close."""
        self._leaving = True
        self._changed("it left the fleet")
        if self.in_flight:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.leave_timeout):
                    await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """Stop the loops and close the channel; calls still running on it are cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.channel.close()

    def _changed(self, reason: str) -> None:
        old, self._last_state = self._last_state, self.state
        if old is not self._last_state:
            _log.info("engine %s: %s -> %s (%s)", self.engine_id, old, self._last_state, reason)
            self._on_change(self, old, reason)

    def _reach(self) -> None:
        if not self._reached:
            self.life = next(_LIVES)
        self._reached = self._reached_once = True
        self._changed("it serves")

    def _lost(self, reason: str) -> None:
        self._reached = False
        for ledger in self.ledgers:
            ledger.forget()
        self._changed(reason)
        self._wake.set()

    async def _follow_connection(self) -> None:
        """See a broken connection without waiting for a call to fail on it."""
        state = self.channel.get_state(try_to_connect=True)
        while True:
            await self.channel.wait_for_state_change(state)
            old, state = state, self.channel.get_state(try_to_connect=True)
            if old is grpc.ChannelConnectivity.READY and self._reached:
                self._lost("the connection broke")
            elif state is grpc.ChannelConnectivity.READY:
                self._wake.set()

    async def _follow_health(self) -> None:
        probe = HealthProbe(self.channel, self._settings.probe_timeout)
        misses = 0
        while True:
            self._wake.clear()
            try:
                problem = await probe()
            except TimeoutError:
                misses += 1
                if misses >= self._settings.probe_misses:
                    self._lost_by_probe(f"{misses} health checks in a row got no answer in time")
            else:
                misses = 0
                if problem:
                    self._lost_by_probe(problem)
                else:
                    self._reach()
            await self._pause()

    def _lost_by_probe(self, reason: str) -> None:
        if self._reached:
            self._lost(reason)
            self._wake.clear()  # the probe has just been made

    async def _pause(self) -> None:
        """Until the next health check: soon for an engine that is not well, at once after an event."""
        well = self._reached
        interval = self._settings.probe_interval if well else self._settings.recovery_interval
        with suppress(TimeoutError):
            async with asyncio.timeout(
                interval
            ):  # wait_for of Python 3.11 loses a cancel that comes with the event
                await self._wake.wait()
        if not self._reached:
            # Probing a broken engine must not become a busy loop, and one whose health check says yes while
            # each request fails must not draw traffic again and again: the pause doubles with each round.
            await asyncio.sleep(min(_LONGEST_HOLD, _SHORTEST_HOLD * 2 ** min(self._rounds, 16)))

    async def _follow_progress(self) -> None:
        """Take a stuck engine out, and end its requests: those without an answer can still go elsewhere."""
        while True:
            await asyncio.sleep(self._settings.stall_timeout / 8)
            silent = self._progress.silent_for(self.in_flight, self.queued)
            if silent:
                self._progress.heard()
                self._rounds += 1
                reason = f"no progress on any of {self.in_flight} requests for {silent:.0f} s"
                self._lost(reason)
                self.channel.drop(reason)

    async def _follow_load(self) -> None:
        ask = self.channel.unary_unary(
            path("GetLoads"),
            request_serializer=pb.GetLoadsRequest.SerializeToString,
            response_deserializer=pb.GetLoadsResponse.FromString,
        )
        while True:
            if self._reached:
                marks = [ledger.mark() for ledger in self.ledgers]
                try:
                    with closed_is_unavailable():
                        answer = await ask(
                            pb.GetLoadsRequest(include=["core"]), timeout=self._settings.load_interval
                        )
                except grpc.aio.AioRpcError as error:
                    # Its report goes stale by itself; whether it lives is for the health check to say.
                    _log.debug("engine %s: GetLoads: %s", self.engine_id, error.code().name)
                else:
                    self._take(answer.loads, marks)
            await asyncio.sleep(self._settings.load_interval * random.uniform(0.8, 1.2))

    def _take(self, loads: Sequence[pb.SchedulerLoad], marks: Sequence[Mark]) -> None:
        """Believe an answer to GetLoads that was asked for at ``marks``."""
        if len(self.ledgers) == 1:
            if loads:
                self.ledgers[0].take(sum_loads(loads), marks[0])
            return
        for load in loads:
            if 0 <= load.dp_rank < len(self.ledgers):
                self.ledgers[load.dp_rank].take(sum_loads([load]), marks[load.dp_rank])


def _report_crash(task: asyncio.Task[None]) -> None:
    """A loop that ends by itself is a defect of ours; without this it would end silently."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s stopped following its engine", task.get_name(), exc_info=error)
