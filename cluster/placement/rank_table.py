"""The rank table of an engine, for sites whose NPUs' addresses HCCL cannot find out by itself.

Formats: version 1.0 for A2 and version 1.2 for nodes of a super-pod (CANN documentation, "rank table configuration").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..topology.model import Node
from .plan import Plan

DEVICE_PORT = 16_666
"""HCCL's default port on an NPU."""


def rank_table(plan: Plan, nodes: Mapping[str, Node]) -> dict[str, Any]:
    """Return the rank table of ``plan`` as plain data; the workers write it as JSON and name it in RANK_TABLE_FILE.

    Args:
        plan: where the ranks sit; every bundle has its NPU.
        nodes: the nodes by id, with the RoCE address of each NPU (``npufleet node`` reads /etc/hccn.conf).

    Raises:
        ValueError: if the address of an NPU is not known, or some nodes are in super-pods and others not.
    """
    used = {bundle.node_id: nodes[bundle.node_id] for bundle in plan.bundles}
    pods = {node.super_pod for node in used.values()}
    if "" in pods and len(pods) > 1:
        raise ValueError("a rank table holds nodes of super-pods or others, not both")
    table: dict[str, Any] = {
        "status": "completed",
        "version": "1.2" if pods != {""} else "1.0",
        "server_count": str(len(used)),
        "server_list": [_server(plan, node) for node in used.values()],
    }
    if pods != {""}:
        table["super_pod_list"] = [
            {
                "super_pod_id": pod,
                "server_list": [{"server_id": n.title} for n in used.values() if n.super_pod == pod],
            }
            for pod in sorted(pods)
        ]
    return table


def _server(plan: Plan, node: Node) -> dict[str, Any]:
    devices = {npu.index: npu for npu in node.devices}
    entries = []
    for bundle in plan.bundles:
        if bundle.node_id != node.node_id:
            continue
        assert bundle.npu is not None, bundle
        address = devices[bundle.npu].address
        if not address:
            raise ValueError(
                f"the RoCE address of NPU {bundle.npu} of {node.title} is not known; give the node an /etc/hccn.conf "
                "and restart its Ray with the flags of `npufleet node`"
            )
        entries.append(
            {
                "device_id": str(bundle.npu),
                "device_ip": address,
                "device_port": str(DEVICE_PORT),
                "rank_id": str(bundle.rank),
            }
        )
    return {
        "server_id": node.title,
        "device": entries,
        **({"host_ip": node.address} if node.super_pod else {}),
    }
