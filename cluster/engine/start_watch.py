"""How far an engine's start is, rank by rank: what its core and workers announce, with a deadline for each phase."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..addresses import netloc
from .phases import PhaseListener, StartPhase

ORDER = ("core", *map(str, StartPhase))
"""The phases between the moment the NPUs are reserved and the moment the engine is ready."""

DEADLINES_S = {
    "core": 600.0,  # imports from a cold, shared disk
    str(StartPhase.PROCESSES): 600.0,
    str(StartPhase.GROUPS): 1200.0,  # HCCL_CONNECT_TIMEOUT is 120 to some thousand seconds
    str(StartPhase.WEIGHTS): 3600.0,  # hundreds of gigabytes from a slow disk
    str(StartPhase.CACHE): 1200.0,
    str(StartPhase.GRAPHS): 3600.0,
}
"""How long each phase may take. What takes longer hangs."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one worker said last."""

    phase: str
    pid: int
    node: str
    since: float


@dataclass(kw_only=True)
class StartWatch:
    """Follows one start. ``size`` is the number of workers."""

    size: int
    host: str
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)  # by finished phase
    ranks: dict[int, Rank] = field(default_factory=dict)
    step: str = ORDER[0]
    core: PhaseListener = field(default_factory=PhaseListener)

    def __post_init__(self) -> None:
        self._word = secrets.token_hex(8)  # others on the network cannot speak for our workers
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((self.host, 0))
        self._socket.setblocking(False)
        self._began = self.clock()

    @property
    def address(self) -> str:
        """What the workers' environment has to hold."""
        return f"{netloc(self.host, self._socket.getsockname()[1])}/{self._word}"

    def poll(self) -> str:
        """Take over what was said meanwhile and return the phase that the slowest part of the engine is in."""
        while (phase := self.core.poll()) is not None:
            self._reach(str(phase))
        for said in self._said():
            rank = Rank(phase=said["phase"], pid=said["pid"], node=said["node"], since=self.clock())
            self.ranks[said["rank"]] = rank
        if len(self.ranks) == self.size:
            self._reach(min((rank.phase for rank in self.ranks.values()), key=ORDER.index))
        return self.step

    def describe(self) -> str:
        """Return the present phase in words, and which ranks it waits for."""
        late = self.late()
        if not self.ranks or len(late) == self.size:
            return self.step
        return f"{self.step}, waiting for rank{'s' if len(late) > 1 else ''} {_ranks(late)}"

    def late(self) -> list[int]:
        """Return the ranks that have not gone beyond the present phase."""
        now = ORDER.index(self.step)
        ranks = range(self.size)
        return [r for r in ranks if r not in self.ranks or ORDER.index(self.ranks[r].phase) <= now]

    def overdue(self) -> str:
        """Return what hangs, empty while the present phase is within its deadline."""
        limit = DEADLINES_S[self.step]
        if self.clock() - self._began <= limit:
            return ""
        text = f"the phase {self.step!r} was not over after {limit:.0f} s"
        if not self.ranks:
            return text
        late = self.late()
        where = ", ".join(f"rank {r} on {self.ranks[r].node}" for r in late[:8] if r in self.ranks)
        silent = [r for r in late if r not in self.ranks]
        told = [where] if where else []
        if silent:
            told.append(f"rank{'s' if len(silent) > 1 else ''} {_ranks(silent)}, which never said anything")
        return f"{text}: it waits for {' and '.join(told)}"

    def finish(self) -> None:
        """The engine is ready: the last phase is over."""
        self._reach("")

    def close(self) -> None:
        """Listen no more."""
        self.core.close()
        self._socket.close()

    def _reach(self, phase: str) -> None:
        """Note that ``phase`` has begun, and how long the one before took; "" for the end."""
        if phase and ORDER.index(phase) <= ORDER.index(self.step):
            return
        now = self.clock()
        self.seconds[self.step] = now - self._began
        self._began = now
        self.step = phase or self.step

    def _said(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            try:
                text = self._socket.recv(4096)
            except BlockingIOError:
                return found
            if (said := self._read(text)) is not None:
                found.append(said)

    def _read(self, text: bytes) -> dict[str, Any] | None:
        """Return what a worker of ours said; None for anything else that came in."""
        try:
            said = json.loads(text)
            ours = said["word"] == self._word and said["phase"] in ORDER and 0 <= said["rank"] < self.size
            return said if ours else None
        except (ValueError, TypeError, KeyError):
            return None


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
