"""What a worker that failed wrote last, wherever in the cluster it ran."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from pathlib import Path

from ..hccl_errors import explain
from .causes import LOG_ENDS, Cause
from .start_watch import StartWatch

logger = logging.getLogger(__name__)

LINES = 5
LINE_CHARS = 240
TAIL_BYTES = 16 << 10
FETCH_S = 10.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


async def told(cause: Cause, watch: StartWatch | None) -> str:
    """Return everything that helps with a failed start in one message: the error, the rank and node it comes from,
    what its codes mean, and the last lines of that worker's log.
    """
    rank = _rank_of(cause, watch)
    about = watch.ranks[rank] if watch is not None and rank is not None else None
    node, pid = (about.node, about.pid) if about else (cause.node, cause.pid)
    return compose(cause.text, rank, node, await _fetch(node, pid) if pid else [])


def compose(text: str, rank: int | None, node: str, lines: list[str]) -> str:
    """Return one message; see :func:`told`."""
    where = f"rank {rank} on {node}: " if rank is not None else ""
    parts = [f"{where}{text}"]
    if meaning := explain(" ".join([text, *lines])):
        parts.append(meaning)
    if lines and text.splitlines()[0][:60] not in " ".join(lines):
        parts.append(LOG_ENDS + " | ".join(lines))
    return ". ".join(part.rstrip(".") for part in parts)


def tail(folder: Path, pid: int) -> list[str]:
    """Return the last lines of the logs that Ray keeps in ``folder`` for process ``pid``."""
    found: list[str] = []
    for path in sorted(folder.glob(f"worker-*-{pid}.*")):
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            continue
        found += [line for line in text.splitlines() if line.strip() and not line.startswith(":")]
    return [_ANSI.sub("", line).strip()[:LINE_CHARS] for line in found[-LINES:]]


def own_tail(pid: int) -> list[str]:
    """Return the last lines of another Ray worker on this node: its logs lie beside this process's own."""
    return tail(Path(os.path.realpath("/proc/self/fd/2")).parent, pid)


def _rank_of(cause: Cause, watch: StartWatch | None) -> int | None:
    if watch is None:
        return None
    for rank, about in watch.ranks.items():
        if cause.pid and (about.pid, about.node) == (cause.pid, cause.node or about.node):
            return rank
    late = watch.late()
    return late[0] if len(late) == 1 and late[0] in watch.ranks else None


async def _fetch(node: str, pid: int) -> list[str]:
    import ray
    from ray.exceptions import RayError

    if not node or node == ray.util.get_node_ip_address():
        return own_tail(pid)
    try:
        return await asyncio.wait_for(asyncio.to_thread(_fetch_there, node, pid), FETCH_S)
    except (RayError, TimeoutError, StopIteration, RuntimeError) as error:
        logger.warning("the log of process %d on %s cannot be read: %r", pid, node, error)
        return []


def _fetch_there(node: str, pid: int) -> list[str]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == node)
    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    task = ray.remote(own_tail).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
    found: list[str] = ray.get(task.remote(pid), timeout=FETCH_S)
    return found
