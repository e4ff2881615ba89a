"""From what `npufleet serve` is given to the FleetConfig it means."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import checks, config, demo_model, device, yaml_text
from .config import FleetConfig

DEMO = "demo"
DEMO_QUESTION = "What is the capital of France?"
DEMO_ANSWER = "Paris"
DEMO_ENGINES = 2
DEMO_ENGINE: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,  # also the size of the profiling run
    "kv_cache_memory_bytes": 256 << 20,  # some 11,000 tokens
}
"""What a laptop can start in seconds: two engines of a 135M model."""

VIRTUAL_CACHE_BYTES = 1 << 30
"""KV cache of an engine on virtual NPUs unless the user sizes it: their HBM is this machine's own memory."""

_CACHE_SIZES = ("kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to serve, and what to ask it once it is up."""

    config: FleetConfig
    device: (
        device.Device | None
    )  # None: the fleet goes to an existing Ray cluster, whose nodes have their own
    question: str | None
    expect: str | None


def resolve(args: argparse.Namespace, say: Callable[[str], None]) -> Target:
    """Return what the command line of `serve` means; the demo checkpoint is made if it is the target.

    Raises:
        ValueError: naming what was given and what is allowed.
    """
    if args.address is not None:
        checks.text(args.address, "--address")
    if args.ask is not None:
        checks.text(args.ask, "--ask")
    made = _config(args, say)
    local = None
    if args.address is None:
        local = device.detect(made.device if _says_device(args) else None)
        made = replace(made, device=local.kind)
    made = _sized(config.with_overrides(made, overrides(args)))
    question = args.ask or (DEMO_QUESTION if args.once else None)
    return Target(
        config=made,
        device=local,
        question=question,
        expect=args.expect or (DEMO_ANSWER if question == DEMO_QUESTION else None),
    )


def wished(args: argparse.Namespace, present: Mapping[str, Any]) -> FleetConfig:
    """Return what the command line of `deploy` means for a running fleet, which stays as it is ``present`` in
    all that the target says nothing of.

    Raises:
        ValueError: naming what was given and what is allowed.
    """
    if _is_file(args.target):
        made = config.from_yaml(Path(args.target), present)
    else:
        models = _config(args, lambda text: None).to_dict()["models"]
        made = config.from_dict({**present, "models": models})
    return _sized(config.with_overrides(made, settings(args.set)))


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Return the FleetConfig keys that the flags set, ``--set`` last so that it wins."""
    flags = {
        "name": args.name,
        "engines": args.replicas,
        "engine.tensor_parallel_size": args.tensor_parallel,
        "router.policy": args.policy,
        "router.port": args.grpc_port,
        "router.host": args.host,
        "gateway.port": args.port,
        "gateway.host": args.host,
        "metrics.port": args.metrics_port,
        "metrics.host": args.host,
    }
    return {key: value for key, value in flags.items() if value is not None} | settings(args.set)


def settings(given: list[str] | None) -> dict[str, Any]:
    """Return the FleetConfig keys that ``--set KEY=VALUE`` sets. Raises ``ValueError`` for what is none."""
    found: dict[str, Any] = {}
    for item in given or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {item!r}: expected KEY=VALUE, for example engine.max_model_len=4096")
        found[key] = yaml_text.load(value, f"--set {checks.shown(item)}")
    return found


def _says_device(args: argparse.Namespace) -> bool:
    return args.device is not None or _is_file(args.target)


def _is_file(target: str) -> bool:
    return target.endswith((".yaml", ".yml"))


def _config(args: argparse.Namespace, say: Callable[[str], None]) -> FleetConfig:
    kind = getattr(args, "device", None) or "npu"
    if args.target == DEMO:
        source = _demo_checkpoint(say)
        return config.for_model(demo_model.NAME, str(source), kind, engines=DEMO_ENGINES, engine=DEMO_ENGINE)
    if _is_file(args.target):
        made = config.from_yaml(Path(args.target))
        return replace(made, device=kind) if getattr(args, "device", None) else made
    folder = Path(args.target).expanduser()
    if (folder / "config.json").is_file():
        return config.for_model(folder.resolve().name, str(folder.resolve()), kind)
    raise ValueError(
        f"{args.target!r} is neither 'demo', nor a .yaml FleetConfig, nor a folder with a Hugging Face "
        "checkpoint (config.json)"
    )


def _demo_checkpoint(say: Callable[[str], None]) -> Path:
    if not demo_model.is_ready():
        say(f"converting the demo model into {demo_model.checkpoint_dir()} (once)")
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // total
        if percent >= shown + 25:
            shown = percent - percent % 25
            say(f"  {shown} % of {total} tensors")

    return demo_model.ensure(progress)


def _sized(made: FleetConfig) -> FleetConfig:
    """Bound the KV cache on virtual NPUs where the user did not."""
    if made.device != "virtual":
        return made
    models = tuple(
        model
        if any(name in model.engine for name in _CACHE_SIZES)
        else replace(model, engine={**model.engine, "kv_cache_memory_bytes": VIRTUAL_CACHE_BYTES})
        for model in made.models
    )
    return replace(made, models=models)
