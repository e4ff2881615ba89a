"""Requests that this router places on an engine but that do not pass through it.

Envoy and lookaside clients ask for an engine and speak to it themselves; later they tell that the first output
came and how the request ended. Whoever forgets to tell is bound by the request's deadline: then it counts as
ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import grpc

from npufleet.cluster.access import AccessLog
from npufleet.cluster.endpoints import EngineEndpoint
from npufleet.cluster.router.metrics import UNKNOWN_MODEL, RouterMetrics
from npufleet.cluster.router.picker import Lease, NoEngine, Picker, RequestInfo
from npufleet.cluster.router.requests import LiveRequests
from npufleet.cluster.router.settings import RouterSettings

_log = logging.getLogger(__name__)
_LATE = 5.0  # seconds after its deadline in which the end of a request may still be told
_SWEEP = 1.0


@dataclass(kw_only=True, eq=False, slots=True)
class Away:
    """One request under way."""

    id: str
    peer: str  # its client
    via: str  # who carries it
    method: str
    info: RequestInfo
    lease: Lease
    others: tuple[EngineEndpoint, ...]  # where a retry may go, best first
    arrived: float
    until: float  # the clock's time at which it counts as ended
    held: ExitStack
    started: bool = False
    first_message: float | None = None  # seconds after its arrival


class AwayRequests:
    """All requests of one router that are under way elsewhere. Belongs to one event loop."""

    def __init__(
        self,
        picker: Picker,
        live: LiveRequests,
        metrics: RouterMetrics,
        settings: RouterSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._picker = picker
        self._live = live
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._access = AccessLog(settings.access_log)
        self._open: dict[str, Away] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def start(self) -> None:
        """Begin to end what nobody ended, in the running event loop."""
        assert self._sweeper is None, "starts once"
        self._sweeper = asyncio.create_task(self._sweep_always(), name="router requests elsewhere")

    def close(self) -> None:
        """Let go of all requests; what they do says nothing any more."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for request_id in list(self._open):
            self.ended(request_id, grpc.StatusCode.CANCELLED)

    async def place(
        self, method: str, info: RequestInfo, *, via: str, peer: str = "", deadline: float | None = None
    ) -> Away:
        """Lease the engine of a request of ``method`` that goes ``via`` somebody; ``deadline`` is in seconds from
        now.

        Raises :class:`NoEngine`, which is counted as the request's end.
        """
        arrived = self._clock()
        model = UNKNOWN_MODEL
        try:
            model = self._picker.pool.resolve(info.model)
            info = replace(info, model=model)
            lease = await self._picker.pick(info)
        except NoEngine as error:
            self._metrics.ended(model, method, error.code)
            raise
        others = self._picker.alternates(info, lease, self._settings.max_attempts - 1)
        held = ExitStack()
        series = self._metrics.of(model)
        held.enter_context(series.in_flight.track_inprogress())
        live = held.enter_context(self._live.enter(info.request_id, peer))
        live.engine_request_id = info.request_id  # nothing changes it on its way
        live.lease = lease
        series.overhead.observe(self._clock() - arrived)
        longest = self._settings.request_timeout if deadline is None else deadline
        away = Away(
            id=secrets.token_hex(8),
            peer=peer,
            via=via,
            method=method,
            info=info,
            lease=lease,
            others=tuple(others),
            arrived=arrived,
            until=arrived + longest + _LATE,
            held=held,
        )
        self._open[away.id] = away
        return away

    def forget(self, via: str) -> None:
        """Whoever carried them is gone, and all requests with it."""
        for request_id in [away.id for away in self._open.values() if away.via == via]:
            self.ended(request_id, grpc.StatusCode.UNAVAILABLE, engine=grpc.StatusCode.CANCELLED)

    def get(self, request_id: str) -> Away | None:
        """The request of that id, while it is under way."""
        return self._open.get(request_id)

    def started(self, request_id: str) -> bool:
        """Its first output came; False where it is not under way."""
        away = self._open.get(request_id)
        if away is None:
            return False
        if not away.started:
            away.started = True
            away.first_message = self._clock() - away.arrived
            away.lease.started()
            if away.method == "Generate":
                self._metrics.of(away.info.model).first_message.observe(away.first_message)
        return True

    def ended(
        self,
        request_id: str,
        code: grpc.StatusCode,
        *,
        engine: grpc.StatusCode | None = None,
        retries: int = 0,
        tokens: int = 0,
    ) -> bool:
        """It ended with ``code`` for its client; False where it is not under way.

        ``engine`` is how the picked engine did, where that is another status; ``retries`` counts the engines that
        were tried before the last one, ``tokens`` those of the answer.
        """
        away = self._open.pop(request_id, None)
        if away is None:
            return False
        engine = code if engine is None else engine
        away.lease.release(engine, tokens)
        away.held.close()
        if retries:
            self._metrics.retries.labels(away.info.model, engine.name).inc(retries)
        self._metrics.ended(away.info.model, away.method, code)
        self._access.write(
            method=away.method,
            code=code.name,
            model=away.info.model,
            tenant=away.info.tenant.name,
            peer=away.peer,
            seconds=self._clock() - away.arrived,
            request_id=away.info.request_id,
            prompt_tokens=away.info.prompt_tokens,
            engine=away.lease.endpoint.engine_id,
            attempts=retries + 1,
            first_message=away.first_message,
            via=away.via,
        )
        return True

    def sweep(self) -> int:
        """End what is past its time; how many that were."""
        now = self._clock()
        for away in self._open.values():
            if away.started:  # its messages are not seen here, so their absence says nothing
                away.lease.heard()
        late = [away.id for away in self._open.values() if away.until <= now]
        for request_id in late:
            self.ended(request_id, grpc.StatusCode.DEADLINE_EXCEEDED)
        if late:
            _log.warning("%d requests elsewhere ended without a word", len(late))
        return len(late)

    async def _sweep_always(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP)
            self.sweep()
