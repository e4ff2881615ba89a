"""`npufleet doctor --nodes`: the same checks on the nodes of a Ray cluster, their clocks, and whether NPUs meet.

Each node answers in tasks that are tied to it and take no CPU or NPU of the fleet; one that does not answer in time
is a finding, not a hang.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..placement import ray_state
from ..placement.group import NODE_ID_LABEL
from ..topology import labels
from ..topology.command import this_node
from ..topology.model import Node, indices_of
from ..topology.sources.environment import MASK, visible
from . import reach
from .examine import machine
from .finding import Finding, Level

AFTER_FAILURE_S = 10.0  # that ranks may still take when one has failed
ANSWER_S = 120.0
CLOCK_ASKS = 5
SKEW_WARN_S, SKEW_FAIL_S = 0.5, 30.0
"""Logs and metrics get hard to read, and from minutes on tokens and certificates are refused."""
FREE_S = 10.0
NOSET = {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}

Told = tuple[str, Finding]
"""A node's title and a finding about it."""


def examine(
    wanted: str, models: Iterable[tuple[str, str]] = (), *, expect: int | None = None
) -> Iterator[Told]:
    """Yield findings about nodes of the Ray cluster that this process is connected to.

    Args:
        wanted: "all", or addresses with commas between.
        models: (name, checkpoint folder) that every node with NPUs must be able to read.
        expect: how many nodes the cluster must have, None if that is not known.

    Raises:
        ValueError: if a node that is asked for is not there.
    """
    import ray

    entries = {entry["NodeID"]: entry for entry in ray.nodes() if entry.get("Alive")}
    if expect is not None:
        yield "cluster", joined(len(entries), expect)
    chosen = choose(ray_state.topology(entries.values()).nodes, wanted)
    asked = {
        node.node_id: _remote(_findings, node).remote(list(models) if node.npus else []) for node in chosen
    }
    answered = []
    for node in chosen:
        told = _answer(asked[node.node_id])
        if isinstance(told, str):
            text = f"does not answer: {told}"
            remedy = "see that its raylet runs (ray status) and that npufleet is installed there"
            yield node.title, Finding(name="node", level=Level.FAIL, text=text, remedy=remedy)
            continue
        answered.append(node)
        yield from ((node.title, Finding(**finding)) for finding in told["findings"])
        yield node.title, counted(node, told["indices"], told["flags"])
    yield from ((node.title, _clock(node)) for node in answered)
    able = [node for node in answered if node.npus]
    if able:
        yield ", ".join(node.title for node in able), _meet(able)


def joined(found: int, expect: int) -> Finding:
    """Check that every node has joined: `ray up` returns before they have, and tells of no error."""
    if found == expect:
        return Finding(name="nodes", level=Level.OK, text=f"{found} of {expect} have joined")
    return Finding(
        name="nodes",
        level=Level.FAIL,
        text=f"{found} of {expect} have joined",
        remedy="give them a minute; then the head's log tells why: /tmp/ray/session_latest/logs/monitor.*",
    )


def choose(nodes: Sequence[Node], wanted: str) -> list[Node]:
    """Return the nodes that ``wanted`` names. Raises ``ValueError`` for one that is not there."""
    if wanted == "all":
        return list(nodes)
    by_title = {node.title: node for node in nodes} | {node.address: node for node in nodes}
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    unknown = [name for name in names if name not in by_title]
    if unknown or not names:
        known = ", ".join(node.title for node in nodes) or "none"
        raise ValueError(
            f"--nodes {wanted!r}: no node {', '.join(unknown) or 'named'}; the cluster has {known}"
        )
    return [by_title[name] for name in dict.fromkeys(names)]


def counted(node: Node, indices: Sequence[int], flags: str) -> Finding:
    """Check that Ray offers the NPUs that the node has, by their indices."""
    offered = [npu.index for npu in node.devices if npu.healthy]
    if offered == list(indices) and (node.exact or not offered):
        return Finding(name="NPUs in Ray", level=Level.OK, text=f"{len(offered)}")
    level = Level.WARN if len(offered) == len(indices) else Level.FAIL
    text = f"Ray offers {len(offered)} NPUs, the node has {len(indices)} healthy ones"
    if level is Level.WARN:
        text = "Ray does not know the node's NPUs by their indices, so ranks cannot be bound to die pairs and rings"
    return Finding(name="NPUs in Ray", level=level, text=text, remedy=f"restart its Ray: ray start … {flags}")


def skewed(offset: float, error: float) -> Finding:
    """Judge the clock of a node: ``offset`` seconds ahead of ours, known to ``error`` seconds."""
    off = max(0.0, abs(offset) - error)
    level = Level.FAIL if off > SKEW_FAIL_S else Level.WARN if off > SKEW_WARN_S else Level.OK
    remedy = (
        "" if level is Level.OK else "synchronize the clocks: chronyc makestep, or timedatectl set-ntp true"
    )
    return Finding(name="clock", level=level, text=f"{offset:+.3f} s (± {error:.3f} s)", remedy=remedy)


def on_each(nodes: Sequence[Node], call: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Run ``call`` on each node and return its answers by node id; a text says why a node gave none."""
    asked = {node.node_id: _remote(call, node).remote(*arguments) for node in nodes}
    return {node_id: _answer(reference) for node_id, reference in asked.items()}


def _remote(call: Any, node: Node, **options: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    tied = NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)
    return ray.remote(call).options(num_cpus=0, scheduling_strategy=tied, max_retries=0, **options)


def _answer(reference: Any, seconds: float = ANSWER_S) -> Any:
    """What a task returned, or why there is nothing, as text."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return ray.get(reference, timeout=seconds)
    except GetTimeoutError:
        return f"nothing came within {seconds:.0f} s"
    except RayError as error:
        return str(error).strip().splitlines()[-1]


def _findings(models: list[tuple[str, str]]) -> dict[str, Any]:
    """Runs on a node."""
    from ..topology.command import flags

    node = this_node()
    return {
        "findings": [asdict(finding) for finding in machine([], models)],
        "indices": [npu.index for npu in node.devices if npu.healthy],
        "flags": " ".join(flags(node)),
    }


def _clock(node: Node) -> Finding:
    asks = []
    call = _remote(_now, node)
    for _ in range(CLOCK_ASKS):
        before = time.time()
        there = _answer(call.remote(), 30.0)
        after = time.time()
        if isinstance(there, float):
            asks.append((after - before, there - (before + after) / 2))
    if not asks:
        return Finding(name="clock", level=Level.WARN, text="not known: the node did not answer")
    took, offset = min(asks)  # the quickest answer says it best
    return skewed(offset, took / 2)


def _now() -> float:
    """Runs on a node."""
    return time.time()


def _meet(nodes: Sequence[Node]) -> Finding:
    """One NPU of each node (two of a single one) in an all-reduce."""
    from ray.util.placement_group import placement_group, remove_placement_group

    ranks = list(nodes) if len(nodes) > 1 else [nodes[0]] * min(2, nodes[0].npus)
    npus = _pick(ranks, ray_state.read().free())
    if isinstance(npus, str):
        return Finding(
            name="HCCL all-reduce", level=Level.WARN, text=npus, remedy="ask again when the fleet is stopped"
        )
    bundles = [
        {labels.RESOURCE: 1.0, **({labels.npu_resource(npu): 1.0} if node.exact else {})}
        for node, npu in zip(ranks, npus, strict=True)
    ]
    group = placement_group(
        bundles,
        name="npufleet doctor",
        bundle_label_selector=[{NODE_ID_LABEL: node.node_id} for node in ranks],
    )
    try:
        if not group.wait(FREE_S):
            text = "not run: Ray did not give one NPU of each node"
            return Finding(name="HCCL all-reduce", level=Level.WARN, text=text, remedy="look at `ray status`")
        return _run(group, ranks, npus)
    finally:
        remove_placement_group(group)


def _pick(ranks: Sequence[Node], free: Mapping[str, int]) -> list[int] | str:
    """A free NPU for each rank, or which node has none."""
    left, chosen = dict(free), []
    for node in ranks:
        open_ = indices_of(left.get(node.node_id, 0))
        if not open_:
            return f"not run: no NPU of {node.title} is free"
        chosen.append(open_[0])
        left[node.node_id] &= ~(1 << open_[0])
    return chosen


def _run(group: Any, ranks: Sequence[Node], npus: Sequence[int]) -> Finding:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    port = _answer(_remote(_free_port, ranks[0]).remote(), 30.0)
    master = f"{ranks[0].address}:{port}"
    began = time.monotonic()
    calls = []
    for rank, (node, npu) in enumerate(zip(ranks, npus, strict=True)):
        options: dict[str, Any] = {
            "num_cpus": 0,
            "resources": {labels.RESOURCE: 1.0},
            "max_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            "runtime_env": {"env_vars": NOSET} if node.exact else {},
        }
        rank_here = ray.remote(_rank).options(**options)
        calls.append(rank_here.remote(node.title, rank, len(ranks), master, npu if node.exact else None))
    results = _gather(dict(zip(calls, (node.title for node in ranks), strict=True)))
    return reach.judge(results, time.monotonic() - began, unheard=len(calls) - len(results))


def _gather(calls: dict[Any, str]) -> list[reach.RankResult]:
    """What ranks say, until all have or, after one that failed, for a little longer: others may only wait for it."""
    import ray

    results, end = [], time.monotonic() + 4 * reach.STEP_S
    while calls:
        done, _ = ray.wait(list(calls), timeout=max(0.0, end - time.monotonic()))
        if not done:
            break
        told, where = _answer(done[0]), calls.pop(done[0])
        failed = reach.RankResult(where=where, code=1, error=str(told))
        results.append(failed if isinstance(told, str) else reach.RankResult(**told))
        if not results[-1].good:
            end = min(end, time.monotonic() + AFTER_FAILURE_S)
    return results


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _rank(where: str, rank: int, world: int, master: str, npu: int | None) -> dict[str, Any]:
    """Runs on a node: NPU ``npu`` of the node, or the one that Ray shows if None."""
    shown = visible(os.environ.get(MASK))
    index = 0 if npu is None else npu if shown is None else shown.index(npu)
    return reach.run_rank(
        f"{where} (NPU {'of Ray' if npu is None else npu})", rank, world, master, index
    ).to_dict()
