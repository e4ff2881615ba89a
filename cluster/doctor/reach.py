"""Whether NPUs reach each other: a real all-reduce, one process a rank, with a deadline and a named culprit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..hccl_errors import explain
from .finding import Finding, Level

MODULE = "npufleet.kernels.reach"
STEP_S = 60.0
"""How long each step may take: opening the NPU, meeting the others, connecting HCCL."""
NEXT = {"": "opening its NPU", "device": "waiting for the other ranks", "joined": "connecting HCCL"}
LAST_LINES = 3


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How far one rank came."""

    where: str
    stages: dict[str, float] = field(default_factory=dict)  # seconds by stage
    bus_bytes_per_s: float = 0.0
    code: int | None = None  # None: it did not end in time
    error: str = ""  # the last lines that it wrote to stderr
    ran: float = 0.0  # seconds until it ended

    @property
    def good(self) -> bool:
        """Whether it passed all stages."""
        return self.code == 0 and "reduced" in self.stages

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that the constructor takes."""
        return {**self.__dict__}


def run_rank(where: str, rank: int, world: int, master: str, npu: int, seconds: float = STEP_S) -> RankResult:
    """Run one rank in a process of its own and return how far it came; it is killed at the deadline."""
    command = [
        sys.executable, "-m", MODULE, "--rank", str(rank), "--world", str(world), "--master", master,
        "--npu", str(npu), "--seconds", str(seconds), "--end-with-stdin",
    ]  # fmt: skip
    began, late = time.monotonic(), False
    here, there = os.pipe()  # it ends when the other end of its stdin does, so with this process too
    try:
        process = subprocess.Popen(
            command, stdin=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        os.close(here)
        try:
            out, err = process.communicate(timeout=3 * seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            late = True
    finally:
        os.close(there)
    return _result(where, out, err, None if late else process.returncode, time.monotonic() - began)


def _result(where: str, out: str, err: str, code: int | None, ran: float) -> RankResult:
    said = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    wrong = "".join(
        f"the sum is {entry['wrong']}, not {entry['wanted']}" for entry in said if "wrong" in entry
    )
    told = [line for line in err.splitlines() if line.strip() and "Warning" not in line]
    return RankResult(
        where=where,
        stages={entry["stage"]: entry["seconds"] for entry in said if "stage" in entry},
        bus_bytes_per_s=max((entry.get("bus_bytes_per_s", 0.0) for entry in said), default=0.0),
        code=code,
        error=wrong or explain(err) or " / ".join(told[-LAST_LINES:]),
        ran=round(ran, 1),
    )


def local(npus: Sequence[int], seconds: float = STEP_S) -> Finding:
    """Let the NPUs of this machine (two of them are enough) reach each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    began = time.monotonic()
    with _Ranks() as ranks:
        results = ranks.all(
            [(f"NPU {npu}", rank, len(npus), master, npu, seconds) for rank, npu in enumerate(npus)]
        )
    return judge(results, time.monotonic() - began)


class _Ranks:
    """Runs ranks side by side."""

    def __enter__(self) -> _Ranks:
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(64)
        return self

    def all(self, calls: list[tuple[str, int, int, str, int, float]]) -> list[RankResult]:
        return list(self._pool.map(lambda call: run_rank(*call), calls))

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()


def judge(results: Sequence[RankResult], seconds: float, unheard: int = 0) -> Finding:
    """Return what the ranks' results mean together; of ``unheard`` more nothing was heard.

    Of several that failed the one that came least far is named, of those the one that failed first: the others have
    waited for it.
    """
    name = "HCCL all-reduce"
    if results and not unheard and all(result.good for result in results):
        speed = min(result.bus_bytes_per_s for result in results) / 1e9
        return Finding(
            name=name,
            level=Level.OK,
            text=f"{len(results)} ranks in {seconds:.0f} s, {speed:.1f} GB/s",
        )
    failed = [result for result in results if not result.good]
    if not failed:
        text = f"nothing was heard of {unheard} of {unheard + len(results)} ranks in {seconds:.0f} s"
        return Finding(name=name, level=Level.FAIL, text=text, remedy="look at `ray status`: is a node away?")
    order = ("", *NEXT)
    culprit = min(failed, key=lambda result: (order.index(_last(result)), not result.error, result.ran))
    fault = "did not end in time" if culprit.code is None else f"failed ({culprit.error or culprit.code})"
    return Finding(
        name=name,
        level=Level.FAIL,
        text=f"{culprit.where} {fault} while {NEXT[_last(culprit)]}; {len(failed) + unheard} of "
        f"{len(results) + unheard} ranks failed",
        remedy=explain(culprit.error)
        or "see that HCCL_IF_IP and HCCL_SOCKET_IFNAME name the network that the nodes share, and that links and "
        "TLS switches of the NPUs agree (hccn_tool -i N -link -g, -tls -g)",
    )


def _last(result: RankResult) -> str:
    return next((stage for stage in ("joined", "device") if stage in result.stages), "")
