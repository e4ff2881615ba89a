"""The engines of the fleet as the router sees them, kept in step with an endpoint source."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from npufleet.cluster.endpoints import EndpointSource, EngineEndpoint, Role, Snapshot
from npufleet.cluster.router.errors import NoEngine, NoEngineReason
from npufleet.cluster.router.ledger import Peers
from npufleet.cluster.router.member import Member, MemberState
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.split.base import Stage
from npufleet.cluster.router.split.roles import fit_for
from npufleet.cluster.router.watch import follow


class StaticSource:
    """A fixed list of engines."""

    def __init__(self, endpoints: Iterable[EngineEndpoint]) -> None:
        self._snapshot = Snapshot(epoch="static", version=1, endpoints=tuple(endpoints))

    async def watch(self) -> AsyncIterator[Snapshot]:
        """Yield the list once and stay open."""
        yield self._snapshot
        await asyncio.Event().wait()


class PoolObserver(Protocol):
    """Told of what happens to engines; the router's metrics are one."""

    def on_state(self, member: Member, old: MemberState, reason: str) -> None:
        """``member`` is now in another state than ``old``."""

    def on_pick(self, member: Member) -> None:
        """A request goes to ``member``."""

    def on_leave(self, member: Member) -> None:
        """``member`` left the fleet and its last stream has ended."""


class EnginePool:
    """Members by engine id. All methods belong to the event loop in which :meth:`start` ran."""

    def __init__(
        self,
        source: EndpointSource,
        settings: RouterSettings,
        observer: PoolObserver,
        clock: Callable[[], float] = time.monotonic,
        peers: Peers | None = None,
    ) -> None:
        """``peers`` are further routers over the same engines that tell each other what they have on them."""
        self._peers = peers
        self.settings = settings
        self._source = source
        self._observer = observer
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._by_model: dict[str, list[Member]] = {}
        self._split: frozenset[str] = frozenset()  # models with engines of several roles
        self._seen: dict[str, float] = {}  # model -> when it last had an endpoint
        self._version: tuple[str, int] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._leavers: dict[asyncio.Task[None], Member] = {}
        self._listeners: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Begin to follow the source."""
        assert self._watcher is None, "a pool starts once"
        self._watcher = asyncio.create_task(follow(self._source, self._apply), name="router endpoints")

    async def close(self) -> None:
        """Close every channel; calls still running on them are cancelled."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        leavers = dict(self._leavers)
        for task in leavers:
            task.cancel()
        await asyncio.gather(*leavers, return_exceptions=True)
        await asyncio.gather(*(m.close() for m in (*self._members.values(), *leavers.values())))
        self._members, self._by_model = {}, {}

    @property
    def retry_after(self) -> float:
        """Seconds after which an engine that is not ready now may be."""
        return max(1.0, self.settings.recovery_interval)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener()`` after each change of the engines or their states."""
        self._listeners.append(listener)

    def members(self, model: str | None = None) -> list[Member]:
        """The engines of ``model``, or all of them, in the order of their ids."""
        if model is not None:
            return list(self._by_model.get(model, ()))
        return [self._members[engine_id] for engine_id in sorted(self._members)]

    def leaving(self) -> list[Member]:
        """Engines that left the fleet and still have running streams here."""
        return list(self._leavers.values())

    def member(self, engine_id: str) -> Member | None:
        """The engine of that id."""
        return self._members.get(engine_id)

    def pickable(self, model: str) -> list[Member]:
        """The engines of ``model`` that may take a request now, in the order of their ids."""
        return [member for member in self._by_model.get(model, ()) if member.pickable]

    def splits(self, model: str) -> bool:
        """Whether the engines of ``model`` have roles."""
        return model in self._split

    def fit(self, model: str, stage: Stage) -> list[Member]:
        """Those of :meth:`pickable` that ``stage`` of a request may go to."""
        members = self.pickable(model)
        return fit_for(stage, members, _role_of) if model in self._split else members

    def models(self) -> dict[str, int]:
        """Known model deployments with their number of engines that may take a request now."""
        oldest = self._clock() - self.settings.model_memory
        self._seen = {m: at for m, at in self._seen.items() if m in self._by_model or at >= oldest}
        return {model: len(self.pickable(model)) for model in sorted(self._seen)}

    def resolve(self, model: str) -> str:
        """``model`` if it is known; for "" the only model there is. Raises :class:`NoEngine`."""
        if model in self._by_model:
            return model
        known = list(self.models())
        if model in known:
            return model
        if not known:
            raise NoEngine(
                NoEngineReason.NOT_READY, "no engine is known to the router yet", retry_after=self.retry_after
            )
        listed = ", ".join(repr(name) for name in known)
        if model:
            message = f"no model {model[:200]!r}; there is: {listed}"
            raise NoEngine(NoEngineReason.UNKNOWN_MODEL, message, models=known)
        if len(known) > 1:
            message = f"the request names no model; there are: {listed}"
            raise NoEngine(NoEngineReason.MODEL_REQUIRED, message, models=known)
        return known[0]

    def not_ready(self, model: str) -> NoEngine:
        """The error for a known model none of whose engines can take a request now."""
        counts: dict[str, int] = {}
        for member in self._by_model.get(model, ()):
            counts[member.state] = counts.get(member.state, 0) + 1
        states = [f"{number} {state}" for state, number in sorted(counts.items())]
        listed = ", ".join(states) or "none registered"
        return NoEngine(
            NoEngineReason.NOT_READY,
            f"no engine of model {model!r} is ready ({listed}); try again in {self.retry_after:g} s",
            models=list(self.models()),
            retry_after=self.retry_after,
        )

    def on_pick(self, member: Member) -> None:
        """Tell the observer of a pick."""
        self._observer.on_pick(member)

    def _apply(self, snapshot: Snapshot) -> None:
        if self._version is not None:
            epoch, version = self._version
            if snapshot.epoch == epoch and snapshot.version <= version:
                return
        self._version = (snapshot.epoch, snapshot.version)
        wanted = {endpoint.engine_id: endpoint.asked_for() for endpoint in snapshot.endpoints}
        for engine_id, member in list(self._members.items()):
            endpoint = wanted.get(engine_id)
            if endpoint is None or _moved(member.endpoint, endpoint):
                self._let_go(member)
            else:
                member.update(endpoint)
        for engine_id, endpoint in wanted.items():
            if engine_id not in self._members:
                member = Member(endpoint, self.settings, self._on_change, self._has_spare, self._peers)
                self._members[engine_id] = member
                member.start()
        self._index()

    def _index(self) -> None:
        by_model: dict[str, list[Member]] = {}
        for member in self.members():
            by_model.setdefault(member.endpoint.model, []).append(member)
        now = self._clock()
        for model in (*self._by_model, *by_model):
            self._seen[model] = now
        self._by_model = by_model
        self._split = frozenset(
            m for m, some in by_model.items() if any(_role_of(e) != Role.BOTH for e in some)
        )
        self._tell()

    def _let_go(self, member: Member) -> None:
        del self._members[member.engine_id]
        task = asyncio.create_task(member.leave(), name=f"router {member.engine_id} leaves")
        self._leavers[task] = member
        task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        member = self._leavers.pop(task)
        self._observer.on_leave(member)

    def _on_change(self, member: Member, old: MemberState, reason: str) -> None:
        self._observer.on_state(member, old, reason)
        self._tell()

    def _has_spare(self, member: Member) -> bool:
        return len(self.pickable(member.endpoint.model)) > 1

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()


def _role_of(member: Member) -> str:
    return member.endpoint.role


def _moved(old: EngineEndpoint, new: EngineEndpoint) -> bool:
    return (old.address, old.model, old.ranks) != (new.address, new.model, new.ranks)
