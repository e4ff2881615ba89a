"""What the command line prints about a fleet."""

from __future__ import annotations

import json
from typing import Any

from .addresses import netloc, reachable
from .config import FleetConfig
from .deploy.plan import change_line
from .topology.labels import ranges

DEATHS_SHOWN = 5


def progress_line(entry: dict[str, Any]) -> str:
    """Return one line about one engine's start, from :meth:`EngineProgress.to_dict`."""
    took = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in entry["seconds"].items())
    detail = f": {entry['detail']}" if entry["detail"] else ""
    return f"engine {entry['engine_id']} {entry['phase']}{detail}{f' ({took})' if took else ''}"


def is_status(answer: Any) -> bool:
    """Say whether ``answer`` is what a controller says about its fleet."""
    return isinstance(answer, dict) and {"fleet", "npus", "models", "engines", "progress"} <= answer.keys()


def render(status: dict[str, Any]) -> str:
    """Return the status that the controller gives, as text."""
    npus = status["npus"]
    lines = [
        f"fleet {status['fleet']} on {status['device']}: {npus['reserved']} of {npus['total']} NPUs in use"
    ]
    if doors := status.get("front_ends"):  # a controller of an older release says nothing
        lines.append(f"  {doors['ready']} of {doors['wanted']} front ends serve")
    lines += [f"  model {m['name']}: {m['ready']} of {m['wanted']} engines ready" for m in status["models"]]
    known = {engine["engine_id"] for engine in status["engines"]}
    for engine in status["engines"]:
        lines.append(
            f"  engine {engine['engine_id']} {engine['state']} at {engine['address']} on {_size(engine)}"
        )
    for entry in status["progress"]:
        if entry["engine_id"] not in known:
            lines.append(f"  {progress_line(entry)}")
    for node in sorted(status["nodes"], key=_order):
        lines += node_lines(node)
    lines += happened(status)
    return "\n".join(lines)


def _order(node: dict[str, Any]) -> tuple[bool, list[int], str]:
    """Nodes with NPUs first, then by address as people count: 10.0.0.9 before 10.0.0.10."""
    address = str(node["address"])
    return not node["npus"], [int(part) for part in address.split(".") if part.isdigit()], address


def node_lines(node: dict[str, Any]) -> list[str]:
    """Return one node as a branch of the tree: what it is, and below it who has which of its NPUs."""
    title = node["address"] or node["node_id"][:12]
    place = [node.get("chip"), f"super-pod {node['super_pod']}" if node.get("super_pod") else ""]
    closed = f"{node['closed']}: no engine comes here" if node.get("closed") else ""
    told = ", ".join(filter(None, [*place, node.get("failure_domain"), closed]))
    lines = [
        f"  node {title}{f' ({told})' if told else ''}: {node['reserved']} of {node['npus']} NPUs in use"
    ]
    runs: list[tuple[list[int], str]] = []
    for entry in node.get("devices", ()):
        holder = entry["engine"] or ("free" if entry["healthy"] else "sick")
        if runs and runs[-1][1] == holder:
            runs[-1][0].append(entry["npu"])
        else:
            runs.append(([entry["npu"]], holder))
    for i, (indices, holder) in enumerate(runs):
        branch = "└─" if i == len(runs) - 1 else "├─"
        lines.append(f"  {branch} {f'NPU {ranges(indices)}':<11} {holder}")
    return lines


def _size(engine: dict[str, Any]) -> str:
    """What an engine runs on: ``virtual npu Ascend910B3``, ``4 x …``, ``2 ranks of 2 x …``."""
    # A controller of an older release says neither.
    npus, ranks = engine.get("npus", 1), engine.get("ranks", 1)
    if ranks > 1:
        return f"{ranks} ranks of {npus // ranks} x {engine['device']}"
    return f"{npus} x {engine['device']}" if npus > 1 else str(engine["device"])


def happened(status: dict[str, Any]) -> list[str]:
    """Return what changed lately: by a user, by the load, by deaths."""
    lines = []
    if silent := status.get("head_silent_s"):
        lines.append(
            f"  Ray's head does not answer: nodes as of {silent:.0f} s ago; serving goes on, changes wait"
        )
    if change := status.get("change"):
        lines.append(f"  change {change_line(change)}")
    lines += [f"  model {model} scaled {why}" for model, why in status.get("scaling", {}).items()]
    health = status.get("health", {})
    for death in health.get("deaths", [])[-DEATHS_SHOWN:]:
        lines.append(f"  engine {death['engine_id']} died {death['seconds_ago']} s ago: {death['why']}")
    for npu in health.get("fenced", []):
        node, _, number = npu.rpartition(":")
        lines.append(f"  NPU {number} of node {node[:12]} is fenced: engines died on it again and again")
    return lines


def how_to_talk(config: FleetConfig) -> str:
    """Return how to use the fleet: curl, the openai package, grpc, and where to look."""
    from .serve import gateway_url

    url = gateway_url(config)
    model = config.models[0].name
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Tell me about Paris."}]})
    key = "-H 'Authorization: Bearer KEY' " if config.gateway.api_keys else ""
    router = netloc(reachable(config.router.host), config.router.port)
    metrics = netloc(reachable(config.metrics.host), config.metrics.port)
    return f"""
Talk to it:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' {key}\\
    -d '{body}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{"KEY" if config.gateway.api_keys else "none"}")
  print(client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hi!"}}]))

  gRPC: vllm.grpc.engine.VllmEngine at {router} (reflection is on; grpcurl -plaintext {router} list)

Look at it:
  npufleet status
  Prometheus http_sd: http://{metrics}/sd
Stop it with Ctrl-C or `npufleet stop`.
"""
