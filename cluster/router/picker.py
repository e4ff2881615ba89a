"""The picker: from a request to a leased engine.

The gRPC front and the OpenAI gateway share one picker, so both see the same loads. A lease counts the request
against its engine until it is released; releasing also tells the pool how the engine did.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

import grpc

from npufleet.cluster.admission.gate import Gate
from npufleet.cluster.admission.settings import AdmissionSettings
from npufleet.cluster.admission.tenants import Tenant
from npufleet.cluster.endpoints import EngineEndpoint
from npufleet.cluster.router.base import EngineLoad, Policy, RequestInfo
from npufleet.cluster.router.decider import Claim, Decider
from npufleet.cluster.router.errors import NoEngine, NoEngineReason
from npufleet.cluster.router.events import EventFollowers
from npufleet.cluster.router.hedge import Hedges
from npufleet.cluster.router.member import Member
from npufleet.cluster.router.pool import EnginePool
from npufleet.cluster.router.split.splitter import Splitter
from npufleet.cluster.transport.base import EngineChannel

_COMPARED = 8  # engines that are compared for a retry

__all__ = ["Lease", "NoEngine", "NoEngineReason", "Picker", "RequestInfo"]


class Lease:
    """One request's claim on one engine.

    Call :meth:`started` at the first output and :meth:`release` at the end, once, whatever happened; as a
    context manager it releases by itself, with the status of a ``grpc.aio.AioRpcError`` that leaves the
    block.
    """

    __slots__ = ("_claim", "_gate", "_member", "_tenant")

    def __init__(self, member: Member, claim: Claim, gate: Gate, tenant: Tenant) -> None:
        self._member = member
        self._claim = claim
        self._gate = gate
        self._tenant = tenant

    @property
    def endpoint(self) -> EngineEndpoint:
        """The engine that was picked."""
        return self._member.endpoint

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that was picked; None where the engine is not split."""
        return self._claim.ledger.rank

    @property
    def channel(self) -> EngineChannel:
        """The pool's channel to that engine. It belongs to the pool: do not close it."""
        return self._member.channel

    @property
    def life(self) -> int:
        """Changes when that engine was lost and came back, maybe as another process."""
        return self._member.life

    def heard(self) -> None:
        """A message came: the engine gets on."""
        self._member.heard()

    def started(self) -> None:
        """The first output came back: the prompt is no longer queued. Further calls change nothing."""
        self._claim.started()

    def release(self, code: grpc.StatusCode = grpc.StatusCode.OK, tokens: int = 0) -> None:
        """The request ended with ``code`` as its engine gave it, after ``tokens`` tokens of an answer. Further
        calls change nothing.

        UNAVAILABLE takes the engine out of the rotation until a probe succeeds, an internal error asks for a
        probe at once; what the client caused leaves the engine alone.
        """
        if self._claim.ended():
            self._member.outcome(code)
            self._gate.charge(self._tenant, tokens)
            self._gate.freed(self._member.endpoint.model)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            self.release(error.code())
        else:
            self.release(grpc.StatusCode.OK if error is None else grpc.StatusCode.CANCELLED)


class Picker:
    """Chooses engines with one policy over one pool."""

    def __init__(
        self,
        pool: EnginePool,
        policy: Policy,
        admission: AdmissionSettings | None = None,
        on_refused: Callable[[str, NoEngineReason], None] = lambda model, reason: None,
        on_split: Callable[[str, str], None] = lambda model, outcome: None,
        on_hedge: Callable[[str, str], None] = lambda model, outcome: None,
        on_resume: Callable[[str, str], None] = lambda model, outcome: None,
    ) -> None:
        """``on_refused(model, reason)`` is told of each request that admission turns away, ``on_split(model, outcome)``
        of each of a model with prefill engines, ``on_hedge(model, outcome)`` of each hedge,
        ``on_resume(model, outcome)`` of each stream that broke.
        """
        self._pool = pool
        self._admission = admission or AdmissionSettings()
        self._decider = Decider(policy, learns=self._admission.ttft_objective > 0)
        self._events = EventFollowers(pool, self._decider)
        self.gate = Gate(self._admission, self, on_refused)
        self.splitter = Splitter(self, pool.settings.split_tokens, on_split)
        self.hedges = Hedges(pool.settings.hedging, on_hedge)
        self.on_resume = on_resume
        pool.listen(self.gate.freed_all)

    @property
    def pool(self) -> EnginePool:
        """The engines this picker chooses from."""
        return self._pool

    @property
    def policy(self) -> Policy:
        """The policy in use."""
        return self._decider.policy

    @property
    def decider(self) -> Decider:
        """What the policy decides with."""
        return self._decider

    @property
    def events(self) -> EventFollowers:
        """The subscriptions to engines' KV events, empty where the policy reads none."""
        return self._events

    def models(self) -> dict[str, int]:
        """Every known model deployment with its number of engines that can take a request now."""
        return self._pool.models()

    async def pick(self, info: RequestInfo) -> Lease:
        """Lease the best engine for ``info``, once admission lets it in. Raises :class:`NoEngine`."""
        model = self._pool.resolve(info.model)
        if not (info.excluded or info.admitted):  # a retry was let in before
            await self.gate.enter(model, info)
        members = self._pool.fit(model, info.stage)
        if not members:
            raise self._pool.not_ready(model)
        candidates = [member for member in members if member.engine_id not in info.excluded]
        if not candidates:
            raise NoEngine(
                NoEngineReason.EXCLUDED,
                f"every ready engine of model {model!r} already failed this request ({len(members)} tried)",
                retry_after=self._pool.retry_after,
            )
        slots = self._admission.engine_slots
        ledgers = [ledger for member in candidates for ledger in member.ledgers]
        ledgers = [ledger for ledger in ledgers if ledger.in_flight < slots] or ledgers
        claim = self._decider.choose(model, info, ledgers, self._pool.settings.load_ttl)
        member = next(member for member in candidates if claim.ledger in member.ledgers)
        self._pool.on_pick(member)
        return Lease(member, claim, self.gate, info.tenant)

    async def second(self, info: RequestInfo, lease: Lease) -> Lease | None:
        """Lease another engine for a request that is on the one of ``lease``; None where there is none with room."""
        excluded = info.excluded | {lease.endpoint.engine_id}
        try:
            return await self.pick(replace(info, excluded=excluded))
        except NoEngine:
            return None

    def room(self, model: str, slots: int) -> int:
        """How many more requests the ready engines of ``model`` take, ``slots`` on each rank; -1 without any."""
        ledgers = [ledger for member in self._pool.pickable(model) for ledger in member.ledgers]
        return sum(max(0, slots - ledger.in_flight) for ledger in ledgers) if ledgers else -1

    def look(self, model: str, info: RequestInfo) -> Sequence[EngineLoad]:
        """The loads of the ready engines of ``model``, as ``info`` would find them."""
        ledgers = [ledger for member in self._pool.fit(model, info.stage) for ledger in member.ledgers]
        return self._decider.look(model, info, ledgers, self._pool.settings.load_ttl)

    def alternates(self, info: RequestInfo, lease: Lease, most: int) -> list[EngineEndpoint]:
        """Up to ``most`` other engines where a retry of ``info`` may go that does not come back to this picker,
        best first. Nothing is counted for them, and of many engines only a few are compared.
        """
        taken = info.excluded | {lease.endpoint.engine_id}
        members = [m for m in self._pool.fit(lease.endpoint.model, info.stage) if m.engine_id not in taken]
        if len(members) > _COMPARED:
            members = random.sample(members, _COMPARED)
        ledgers = [ledger for member in members for ledger in member.ledgers]
        loads = self._decider.look(lease.endpoint.model, info, ledgers, self._pool.settings.load_ttl)
        costs = {load.engine_id: self._decider.policy.score(info, load) for load in loads}
        last = max(costs.values(), default=0.0)
        members.sort(key=lambda m: min(costs.get(ledger.engine_id, last) for ledger in m.ledgers))
        return [member.endpoint for member in members[:most]]
