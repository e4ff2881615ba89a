"""Data-parallel engines: one AsyncLLM in front, and an engine core for each rank in the engine's placement group.

vLLM's launcher for Ray gives each rank a placement group of its own and a processor for the core. An engine here has
one group, planned as a whole: rank r has the bundles from r · w on, w NPUs each, and its core sits in the first of them
without taking anything.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..placement.plan import Plan
from .causes import Cause, StartFailed
from .coordinator import Coordinator
from .phases import StartPhase, announce
from .rank import RankActor

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

BUNDLES = "VLLM_RAY_BUNDLE_INDICES"
POLL_S = 0.5
MORE_FAILURES_S = 2.0  # the first rank to fail may only have lost the one that did wrong
LAST_WORD_MS = 2000
_PASSED_ON = ("VLLM_", "HCCL_", "NPUFLEET_")
_OF_A_NODE = ("VLLM_HOST_IP", "VLLM_HOST_PORT")


@dataclass(kw_only=True)
class Ranks:
    """The engine cores of one engine. Their end is the engine's end: one that dies is told to the front end as dead."""

    actors: list[Any]
    coordinator: Coordinator
    listeners: tuple[Any, Any]  # where the front end hears: its input and output
    _stopped: threading.Event = field(default_factory=threading.Event)

    def client_addresses(self) -> dict[str, Any]:
        """Return what vLLM's client of cores that it did not start itself wants to know."""
        inputs, outputs = self.listeners
        return {
            "input_address": inputs.address,
            "output_address": outputs.address,
            "input_listener": inputs.socket,
            "output_listener": outputs.socket,
            "stats_update_address": self.coordinator.front,
        }

    def run(self) -> None:
        """Let the started cores serve, and watch them."""
        runs = [actor.run.remote() for actor in self.actors]
        threading.Thread(target=self._watch, args=(runs,), name="watch ranks", daemon=True).start()

    def _watch(self, runs: list[Any]) -> None:
        import ray

        while not self._stopped.is_set():
            ended, _ = ray.wait(runs, num_returns=1, timeout=POLL_S)
            if ended or not self.coordinator.proc.is_alive():
                break
        if not self._stopped.is_set():
            who = f"rank {runs.index(ended[0])}" if ended else "the coordinator of the ranks"
            logger.error("%s has ended; the engine ends with it%s", who, _why(ended))
            self._tell_dead()

    def _tell_dead(self) -> None:
        """Say what a core says that dies with its eyes open; the front end then fails every request."""
        import zmq
        from vllm.v1.engine.core import EngineCoreProc

        with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
            sender.setsockopt(zmq.LINGER, LAST_WORD_MS)
            sender.connect(self.listeners[1].address)
            sender.send(EngineCoreProc.ENGINE_CORE_DEAD)

    def stop(self) -> None:
        """End cores, workers and coordinator; again changes nothing."""
        import ray

        if self._stopped.is_set():
            return
        self._stopped.set()
        for actor in self.actors:
            ray.kill(actor)
        self.coordinator.shutdown()
        for listener in self.listeners:
            listener.cleanup()


def _why(ended: list[Any]) -> str:
    import ray
    from ray.exceptions import RayError

    try:
        ray.get(ended)
    except RayError as error:
        return f": {Cause.of(error).text}"
    return ""


def launch(config: VllmConfig, plan: Plan, group: PlacementGroup, runtime_env: Any) -> Ranks:
    """Start the cores of a data-parallel engine in its placement group; returns when all can answer.

    Blocks; call it in a thread.

    Args:
        config: vLLM's configuration, with ``data_parallel_size`` above 1.
        plan: the engine's bundles, rank by rank.
        group: its placement group.
        runtime_env: Ray's environment for the cores' processes.

    Raises:
        StartFailed: a rank did not start; it says why.
    """
    import ray
    from vllm.v1.engine.utils import EngineZmqAddresses

    parallel = config.parallel_config
    width, size = parallel.world_size, parallel.data_parallel_size
    first = [plan.bundles[rank * width].node_id for rank in range(size)]
    here = ray.get_runtime_context().get_node_id()
    together = {bundle.node_id for bundle in plan.bundles} == {here}
    listeners = _listen(together)
    actors = [_actor(group, rank, width, runtime_env) for rank in range(size)]
    announce(StartPhase.PROCESSES, os.getpid())
    coordinator = Coordinator(
        ranks=size,
        waves=config.model_config.is_moe,
        host=ray.util.get_node_ip_address(),
        together=together,
        logging_config=config.logging_config,
    )
    ranks = Ranks(actors=actors, coordinator=coordinator, listeners=listeners)
    started = False
    try:
        parallel.data_parallel_master_ip, parallel._coord_store_port = ray.get(actors[0].open_store.remote())
        addresses = EngineZmqAddresses(
            inputs=[listeners[0].address],
            outputs=[listeners[1].address],
            coordinator_input=coordinator.input,
            coordinator_output=coordinator.output,
            frontend_stats_publish_address=coordinator.front,
        )
        local = _numbers_on_node(first)
        _await(
            [
                actor.start.remote(_of_rank(config, rank), addresses, rank, local[rank])
                for rank, actor in enumerate(actors)
            ]
        )
        started = True
    finally:
        if not started:
            ranks.stop()
    return ranks


def _listen(together: bool) -> tuple[Any, Any]:
    """Open the front end's sockets: files where all ranks are on this node, ports of its address otherwise."""
    import ray
    import zmq
    from vllm.utils.network_utils import get_open_zmq_ipc_path, get_tcp_uri, make_zmq_listener

    def path() -> str:
        return get_open_zmq_ipc_path() if together else get_tcp_uri(ray.util.get_node_ip_address(), 0)

    return make_zmq_listener(path(), zmq.ROUTER), make_zmq_listener(path(), zmq.PULL)


def _actor(group: PlacementGroup, rank: int, width: int, runtime_env: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PASSED_ON) and name not in _OF_A_NODE
    }
    environment[BUNDLES] = ",".join(str(rank * width + number) for number in range(width))
    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank * width)
    options = {"num_cpus": 0, "scheduling_strategy": place, "runtime_env": runtime_env}
    return ray.remote(RankActor).options(**options).remote(environment)


def _of_rank(config: VllmConfig, rank: int) -> VllmConfig:
    """The configuration of a rank: names of its own, where Ray's names of actors and connectors' ids would meet, and
    its part of the NPUs that are planned for each worker.
    """
    own = copy.copy(config)
    own.instance_id = f"{config.instance_id}_dp{rank}"
    settings, width = config.additional_config, config.parallel_config.world_size
    if isinstance(settings, dict) and "npus" in settings:
        own.additional_config = {**settings, "npus": settings["npus"][rank * width : (rank + 1) * width]}
    if config.kv_transfer_config is not None:
        own.kv_transfer_config = copy.copy(config.kv_transfer_config)
        own.kv_transfer_config.engine_id = f"{config.kv_transfer_config.engine_id}_dp{rank}"
    return own


def _numbers_on_node(nodes: list[str]) -> list[int]:
    """Number equal entries: a, b, a → 0, 0, 1."""
    seen: Counter[str] = Counter()
    numbers = []
    for node in nodes:
        numbers.append(seen[node])
        seen[node] += 1
    return numbers


def _await(starts: list[Any]) -> None:
    """Wait for all of ``starts``; at the first that fails wait for others no longer than it may take to fail too."""
    import ray
    from ray.exceptions import RayError

    causes: list[Cause] = []
    while starts:
        ended, starts = ray.wait(starts, num_returns=1, timeout=MORE_FAILURES_S if causes else None)
        if not ended:
            break
        try:
            ray.get(ended)
        except RayError as error:
            causes.append(Cause.of(error))
    if causes:
        raise StartFailed(next((cause for cause in causes if cause.final), causes[0]))
