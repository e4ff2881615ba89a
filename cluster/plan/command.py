"""``npufleet plan memory``: the memory ledger of a fleet's models or of one checkpoint, and whether they fit."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import checks, config
from ..checkpoint.files import read_json
from . import placement, shared
from .memory import CHIPS, GIB, HCCL_BUFFERS, Ledger, Limits, ledger
from .model import ModelShape, from_config
from .quantization import MODELSLIM_FILE
from .weights import Layout, whole_shared

_EPILOG = """\
examples:
  npufleet plan memory fleet.yaml
  npufleet plan memory ./Qwen3-32B --tensor-parallel 4
  npufleet plan memory ./DeepSeek-V3/config.json --tensor-parallel 4 --data-parallel 8 --expert-parallel --chip A3
"""
_NUMBERS = {
    "max_model_len": "tokens of the longest request",
    "max_num_batched_tokens": "tokens of the largest step",
    "max_num_seqs": "requests of the largest step",
}

MOST_GIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A model to plan for: its configuration and vLLM's engine arguments."""

    name: str
    file: Path
    engine: Mapping[str, Any]


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plan`` to the command line."""
    plan = commands.add_parser("plan", help="what a model needs, before anything starts")
    kinds = plan.add_subparsers(dest="kind", required=True, metavar="WHAT")
    memory = kinds.add_parser(
        "memory",
        help="memory per NPU, whether it fits, tokens of KV cache",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    memory.add_argument("target", metavar="CONFIG.yaml|MODEL_DIR|config.json", help="what to plan for")
    memory.add_argument("--tensor-parallel", type=int, metavar="N", help="NPUs that share each layer")
    memory.add_argument(
        "--decode-context-parallel",
        type=int,
        metavar="N",
        help="of these, NPUs that share a sequence's KV cache",
    )
    memory.add_argument("--pipeline-parallel", type=int, metavar="N", help="stages of layers")
    memory.add_argument("--data-parallel", type=int, metavar="N", help="replicas that step together")
    memory.add_argument("--expert-parallel", action="store_true", help="whole experts on each rank")
    for name, text in _NUMBERS.items():
        memory.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    memory.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="of an NPU's memory")
    memory.add_argument("--chip", choices=CHIPS, default=CHIPS[0], help="default: %(default)s")
    memory.add_argument(
        "--hbm", type=float, default=64.0, metavar="GIB", help="per NPU (default %(default)g)"
    )
    memory.add_argument(
        "--hccl-buffsize", type=int, default=200, metavar="MB", help="HCCL_BUFFSIZE (default %(default)s)"
    )
    memory.add_argument("--json", action="store_true", help="print the ledgers as JSON")
    placement.add_arguments(kinds)


def run(args: argparse.Namespace) -> int:
    """Print the ledgers; 0 if every model fits, 1 if one does not.

    Raises:
        ValueError: for a configuration that cannot be read or planned for.
    """
    ledgers = [(wanted, plan(wanted, args)) for wanted in find(Path(args.target))]
    if args.json:
        print(json.dumps([as_data(wanted, found) for wanted, found in ledgers], indent=2))
    else:
        print("\n\n".join("\n".join(render(wanted.name, found)) for wanted, found in ledgers))
    return 0 if all(found.fits for _, found in ledgers) else 1


def find(target: Path) -> list[Wanted]:
    """The models of a FleetConfig file, or the one of a checkpoint's folder or its config.json.

    Raises:
        ValueError: if it is none of these.
    """
    if target.suffix in (".yaml", ".yml"):
        return [
            Wanted(name=model.name, file=Path(model.source) / "config.json", engine=model.engine)
            for model in config.from_yaml(target).models
        ]
    file = target / "config.json" if target.is_dir() else target
    if file.suffix != ".json" or not file.is_file():
        raise ValueError(
            f"{target}: expected a FleetConfig (.yaml), a folder with a Hugging Face checkpoint (config.json) "
            "or its config.json"
        )
    return [Wanted(name=file.resolve().parent.name, file=file, engine={})]


def plan(wanted: Wanted, args: argparse.Namespace) -> Ledger:
    """The ledger of one model; what the command line says wins over the engine arguments.

    Raises:
        ValueError: for a model or an argument that the ledger does not know.
    """
    engine, where = wanted.engine, f"model {wanted.name!r}"
    if engine.get("prefill_context_parallel_size", 1) != 1:
        raise ValueError(f"{where}: memory is planned for prefill_context_parallel_size 1 only")
    for name in ("hf_overrides", "kv_cache_memory_bytes", "num_gpu_blocks_override"):
        if engine.get(name):
            raise ValueError(
                f"{where}: memory cannot be planned with {name}; leave it out to plan without it"
            )
    details = dict(read_json(wanted.file))
    if engine.get("dtype", "auto") != "auto":
        details["dtype"] = engine["dtype"]

    def number(name: str, option: int | None, default: int | None) -> int | None:
        given = engine.get(name, default) if option is None else option
        return None if given is None else checks.integer(given, f"{where}: {name}", 1, 1 << 30)

    sizes = {
        name: number(name, getattr(args, name), default)
        for name, default in (
            ("max_model_len", None),
            ("max_num_batched_tokens", 2048),
            ("max_num_seqs", 256),
        )
    }
    share = args.gpu_memory_utilization
    if share is None:
        share = engine.get("gpu_memory_utilization", Limits.gpu_memory_utilization)
    if not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"{where}: gpu_memory_utilization is {share!r}; expected more than 0 and at most 1")
    if not 0 < args.hbm <= MOST_GIB:
        raise ValueError(f"--hbm is {args.hbm:g}; expected more than 0 and at most {MOST_GIB:,} GiB")
    limits = Limits(
        **{name: size for name, size in sizes.items() if size is not None},
        gpu_memory_utilization=share,
        enforce_eager=bool(engine.get("enforce_eager", False)),
        hbm=int(args.hbm * GIB),
        hccl_buffsize=checks.integer(args.hccl_buffsize, "--hccl-buffsize", 1, 1 << 20),
        chip=args.chip,
    )
    layout = Layout(
        tensor=number("tensor_parallel_size", args.tensor_parallel, 1) or 1,
        data=number("data_parallel_size", args.data_parallel, 1) or 1,
        pipeline=number("pipeline_parallel_size", args.pipeline_parallel, 1) or 1,
        context=number("decode_context_parallel_size", args.decode_context_parallel, 1) or 1,
        expert_parallel=args.expert_parallel or bool(engine.get("enable_expert_parallel", False)),
        shared=shared.of_engine(engine, where),
    )
    try:
        shape = from_config(details, str(wanted.file), _description(wanted.file.parent))
        _check_quantization(engine.get("quantization"), shape)
        return ledger(shape, layout, limits)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _description(folder: Path) -> dict[str, Any] | None:
    file = folder / MODELSLIM_FILE
    return read_json(file) if file.is_file() else None


def _check_quantization(wanted: Any, shape: ModelShape) -> None:
    """The plan follows the checkpoint; an argument that asks for more would quantize while loading."""
    if wanted and wanted != "fp8" and shape.quantization is None:
        raise ValueError(f"quantization is {wanted!r}, but the checkpoint is not quantized; leave it out")


def render(name: str, found: Ledger) -> Iterator[str]:
    """The ledger as lines for a terminal."""
    layout, limits, shape = found.layout, found.limits, found.shape
    split = f"tensor parallel {layout.tensor}, data parallel {layout.data}"
    if layout.context > 1:
        split += f", decode context parallel {layout.context}"
    if layout.pipeline > 1:
        split += f", {layout.pipeline} stages"
    if shape.experts:
        ranks = layout.routed_ranks if layout.shared.ranks else layout.expert_ranks
        split += f", experts {f'spread over {ranks} ranks' if layout.expert_parallel else 'sliced'}"
        if layout.shared.ranks:
            split += f", shared ones on {layout.shared.ranks} of their own"
        elif shape.experts.shared:
            split += f", shared ones {'replicated' if whole_shared(shape, layout) else 'sliced'}"
    held = f"{shape.quantization.format}, {shape.dtype}" if shape.quantization else shape.dtype
    yield f"{name} ({shape.model_type}, {held}) on {layout.npus} × {limits.chip}: {split}"
    fullest = f" of stage {layout.stage}, the fullest" if layout.pipeline > 1 else ""
    if layout.shared.ranks:
        fullest += f" with {'shared' if layout.on_shared_rank else 'routed'} experts, the fuller kind"
    yield f"one NPU{fullest}: {limits.hbm / GIB:.1f} GiB, of which vLLM may use {found.budget / GIB:.2f}"
    for part in (*found.weights, *found.derived):
        yield _line(part.name, part.bytes)
    yield _line(f"activations of {limits.max_num_batched_tokens:,} tokens", found.activations)
    yield _line("graph pool", found.graphs)
    groups = ", ".join(found.groups) or "none"
    yield _line(f"HCCL, {HCCL_BUFFERS} × {limits.hccl_buffsize} MB a group: {groups}", found.hccl)
    yield _line("left for the KV cache", found.budget - found.used)
    requests = found.kv_tokens / found.max_length
    shared = f" on one of {layout.context} NPUs" if layout.context > 1 else ""
    yield (
        f"KV cache: {found.kv_per_token:,} bytes a token{shared}, {found.kv_tokens:,} tokens, "
        f"{requests:.2f} requests of {found.max_length:,}"
    )
    yield "fits" if found.fits else f"DOES NOT FIT: {advice(found)}"


def advice(found: Ledger) -> str:
    """What would make it fit."""
    if found.kv_tokens:
        return f"lower max_model_len to {found.kv_tokens:,}, or use more NPUs per engine"
    missing = (found.used - found.budget) / GIB
    ways = "a larger tensor_parallel_size"
    if found.shape.experts:
        ways += ", or enable_expert_parallel with a larger data_parallel_size"
    return f"{max(missing, 0):.2f} GiB are missing before any KV cache; use {ways}"


def as_data(wanted: Wanted, found: Ledger) -> dict[str, Any]:
    """The ledger as plain data. Bytes."""
    return {
        "model": wanted.name,
        "layout": asdict(found.layout),
        "limits": asdict(found.limits),
        "weights": {part.name: part.bytes for part in found.weights},
        "derived": {part.name: part.bytes for part in found.derived},
        "activations": found.activations,
        "graphs": found.graphs,
        "hccl": {"groups": list(found.groups), "bytes": found.hccl},
        "budget": found.budget,
        "used": found.used,
        "kv": {"bytes_per_token": found.kv_per_token, "tokens": found.kv_tokens},
        "fits": found.fits,
    }


def _line(text: str, size: int) -> str:
    amount = size / GIB
    digits = 2 if math.isclose(amount, 0) or abs(amount) >= 0.005 else 4
    return f"  {text:<64} {amount:>9.{digits}f} GiB"
