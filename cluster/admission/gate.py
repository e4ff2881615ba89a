"""The gate that each request passes before an engine is chosen for it.

Three questions in this order: would its first token come within the objective; has its tenant tokens left; has an
engine room for it. The first two refuse at once and tell when to come back, the third lets it wait, in a bounded
queue that tenants share by weight. When to come back follows from what is known: the time until the tenant's bucket
holds enough, or until the engines will have worked off what is before it (work that waits shrinks by one second a
second), spread by a quarter so that those who were refused together do not come back together.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from npufleet.cluster.admission.bucket import TokenBucket
from npufleet.cluster.admission.fair import FairQueue
from npufleet.cluster.admission.settings import AdmissionSettings
from npufleet.cluster.admission.tenants import Tenant
from npufleet.cluster.router.base import EngineLoad, RequestInfo
from npufleet.cluster.router.errors import NoEngine, NoEngineReason
from npufleet.cluster.router.policies.predicted_ttft import predict

_SPREAD = 0.25
_SHORTEST = 1.0


class Engines(Protocol):
    """What the gate asks about the engines of one model."""

    def room(self, model: str, slots: int) -> int:
        """How many more requests the ready engines of ``model`` take with ``slots`` each; -1 without any."""

    def look(self, model: str, info: RequestInfo) -> Sequence[EngineLoad]:
        """The loads of the ready engines of ``model``, as ``info`` would find them."""


def soonest(info: RequestInfo, loads: Sequence[EngineLoad], waiting: int = 0) -> tuple[float, float]:
    """Seconds that others' work and its own prompt take before the first token of ``info``, on the engine of ``loads``
    that is soonest.

    0, 0 while nothing is known of the engines' pace. ``waiting`` requests in the queue count as prompts like its own.
    """
    known = [load for load in loads if load.pace.known]
    if not known:
        return 0.0, 0.0
    wait, own = min((predict(info, load) for load in known), key=sum)
    wait += waiting * own / len(known)
    return wait, own + min(load.pace.base for load in known)


def overdue(wait: float, own: float, objective: float) -> float:
    """Seconds to come back in for a first token within ``objective``; 0 or less: it comes in time.

    What its own prompt takes, it takes whenever it comes.
    """
    return min(wait + own - objective, wait)


class Gate:
    """One router's gate. Belongs to one event loop."""

    def __init__(
        self,
        settings: AdmissionSettings,
        engines: Engines,
        on_refused: Callable[[str, NoEngineReason], None] = lambda model, reason: None,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._on_refused = on_refused
        self._buckets: dict[str, TokenBucket] = {}
        self._queues: dict[str, FairQueue[asyncio.Future[None]]] = {}
        self._granted: dict[str, int] = {}  # let out of the queue, not on an engine yet

    def waiting(self, model: str) -> int:
        """Requests of ``model`` that wait here."""
        queue = self._queues.get(model)
        return 0 if queue is None else len(queue)

    async def enter(self, model: str, info: RequestInfo) -> None:
        """Return when ``info`` may go to an engine. Raises :class:`NoEngine` where it may not.

        The caller claims an engine before it waits for anything else.
        """
        self._check_objective(model, info)
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = FairQueue()
        if len(queue) >= self._settings.max_queue:
            message = f"{len(queue)} requests of model {model!r} already wait for an engine"
            raise self._refuse(model, NoEngineReason.OVERLOADED, message, self._wait_of(model, info))
        self._check_rate(model, info)
        room = self._engines.room(model, self._settings.engine_slots)
        if room < 0 or (room > self._granted.get(model, 0) and not queue):
            return  # without any engine there is nothing to wait for: the picker says why
        await self._wait(model, info, queue)

    def freed(self, model: str) -> None:
        """An engine of ``model`` has room again, or its engines changed: let waiting requests on."""
        queue = self._queues.get(model)
        if not queue:
            return
        room = self._engines.room(model, self._settings.engine_slots)
        while queue and (room < 0 or room > self._granted.get(model, 0)):
            ticket = queue.pop()
            if ticket is not None and not ticket.done():
                self._granted[model] = self._granted.get(model, 0) + 1
                ticket.set_result(None)

    def freed_all(self) -> None:
        """As :meth:`freed`, for every model."""
        for model in list(self._queues):
            self.freed(model)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """The answer to a request of ``tenant`` had ``tokens`` tokens."""
        bucket = self._bucket(tenant)
        if bucket is not None:
            bucket.charge(tokens)

    async def _wait(self, model: str, info: RequestInfo, queue: FairQueue[asyncio.Future[None]]) -> None:
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tenant = info.tenant
        queue.push(
            ticket,
            tenant=tenant.name,
            weight=tenant.weight,
            priority=info.priority,
            cost=float(max(1, info.prompt_tokens)),
        )
        try:
            async with asyncio.timeout(self._settings.queue_timeout):
                await ticket
        except (TimeoutError, asyncio.CancelledError) as error:
            queue.remove(ticket)
            if ticket.done() and not ticket.cancelled():  # let out, and gone in the same moment
                self._granted[model] -= 1
                self.freed(model)
            if not isinstance(error, TimeoutError):
                raise
            seconds = self._settings.queue_timeout
            message = f"no engine of model {model!r} had room within {seconds:g} s"
            raise self._refuse(
                model, NoEngineReason.OVERLOADED, message, self._wait_of(model, info)
            ) from error
        self._granted[model] -= 1

    def _check_rate(self, model: str, info: RequestInfo) -> None:
        bucket = self._bucket(info.tenant)
        wait = bucket.take(max(1, info.prompt_tokens)) if bucket is not None else 0.0
        if wait > 0:
            message = (
                f"tenant {info.tenant.name!r} has used its {info.tenant.tokens_per_minute} tokens per minute"
            )
            raise self._refuse(model, NoEngineReason.RATE_LIMITED, message, wait)

    def _check_objective(self, model: str, info: RequestInfo) -> None:
        objective = self._settings.ttft_objective
        if not objective:
            return
        wait, own = self._predict(model, info)
        late = overdue(wait, own, objective)
        if late > 0:
            message = (
                f"the first token would come in {wait + own:.1f} s, later than {objective:g} s: "
                f"the engines of model {model!r} are full"
            )
            raise self._refuse(model, NoEngineReason.OVERLOADED, message, late)

    def _wait_of(self, model: str, info: RequestInfo) -> float:
        return self._predict(model, info)[0]

    def _predict(self, model: str, info: RequestInfo) -> tuple[float, float]:
        return soonest(info, self._engines.look(model, info), self.waiting(model))

    def _bucket(self, tenant: Tenant) -> TokenBucket | None:
        if not tenant.tokens_per_minute:
            return None
        bucket = self._buckets.get(tenant.name)
        if bucket is None:
            bucket = self._buckets[tenant.name] = TokenBucket(tenant.tokens_per_minute)
        return bucket

    def _refuse(self, model: str, reason: NoEngineReason, message: str, wait: float) -> NoEngine:
        self._on_refused(model, reason)
        seconds = max(_SHORTEST, wait) * random.uniform(1.0, 1.0 + _SPREAD)
        return NoEngine(reason, f"{message}; try again in {seconds:.1f} s", retry_after=seconds)
