"""A worker that says how far its start is.

vLLM builds a worker in one go (device, groups, weights) and says nothing until all is done or all has failed. This
module offers, under the name :func:`name_of` gives, a subclass of whatever worker class the platform chose; its
steps are announced to the engine over UDP. A datagram that is lost costs a line of progress, nothing else.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from .. import env
from .phases import StartPhase

_PREFIX = "Phased_"
_DOT = "_dot_"


def name_of(worker_cls: str) -> str:
    """Return the qualified name of the announcing subclass of the worker class named ``worker_cls``."""
    return f"{__name__}.{_PREFIX}{worker_cls.replace('.', _DOT)}"


def __getattr__(name: str) -> type:
    """Make the class behind a name that :func:`name_of` gave."""
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.utils.import_utils import resolve_obj_by_qualname

    base = resolve_obj_by_qualname(name.removeprefix(_PREFIX).replace(_DOT, "."))
    made = type(name, (_Announcing, base), {"__module__": __name__})
    globals()[name] = made
    return made


class _Announcing:
    """What is put before a worker class: each step says that it begins."""

    def init_device(self) -> None:
        announce_worker(StartPhase.GROUPS, rank_of(self))
        super().init_device()  # type: ignore[misc]

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        announce_worker(StartPhase.WEIGHTS, rank_of(self))
        return super().load_model(*args, **kwargs)  # type: ignore[misc]

    def determine_available_memory(self) -> Any:
        announce_worker(StartPhase.CACHE, rank_of(self))
        return super().determine_available_memory()  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        announce_worker(StartPhase.GRAPHS, rank_of(self))
        return super().compile_or_warm_up_model()  # type: ignore[misc]


def rank_of(worker: Any) -> int:
    """Return the rank of a worker within its engine, all data-parallel replicas counted through."""
    parallel = worker.vllm_config.parallel_config
    return int(parallel.data_parallel_rank * parallel.world_size + worker.rank)


def announce_worker(phase: StartPhase, rank: int) -> None:
    """Tell the engine that this process, the worker of ``rank``, begins ``phase``; nobody listening is no error."""
    to = env.phases()
    if to is None:
        return
    host, port, word = to
    said = {"word": word, "phase": str(phase), "rank": rank, "pid": os.getpid(), "node": own_node()}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(json.dumps(said).encode(), (host, port))
        except OSError:
            return


def own_node() -> str:
    """Return the address of this node in the Ray cluster, this machine's name where there is none."""
    import ray

    return ray.util.get_node_ip_address() if ray.is_initialized() else socket.gethostname()
