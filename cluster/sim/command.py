"""``npufleet sim-engine``: simulated engines that serve VllmEngine, many in one process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import checks
from ..doctor.finding import Level
from ..doctor.local import free_port
from ..folder import Folder
from .timing import DEFAULT_PRESET, PRESETS, DeviceTime, preset

MOST_TOKENS = 1 << 30


def add_arguments(commands: Any) -> None:
    """Add the command to the command line."""
    made = commands.add_parser(
        "sim-engine",
        help="serve engines whose device is simulated: vLLM's scheduler over a device-time model",
        description="Serve vllm.grpc.engine.VllmEngine with vLLM's own scheduler, KV-cache manager and KV events "
        "over a model of a device's step times. Answers are meaningless tokens at realistic times.",
    )
    made.add_argument(
        "--preset",
        default=DEFAULT_PRESET,
        help=f"device and model, literature-calibrated: {', '.join(sorted(PRESETS))} (default %(default)s)",
    )
    made.add_argument("--engines", type=int, default=1, help="how many (default %(default)s)")
    made.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    made.add_argument(
        "--port", type=int, default=0, help="port of the first engine, the others follow; 0 = any free ones"
    )
    made.add_argument(
        "--model", type=Path, help="folder with tokenizer and config.json (default: one token a byte)"
    )
    made.add_argument("--name", default="sim", help="name of the model (default %(default)s)")
    made.add_argument("--max-model-len", type=int, default=131_072, help="tokens (default %(default)s)")
    made.add_argument(
        "--block-size", type=int, default=128, help="tokens of a KV block (default %(default)s)"
    )
    made.add_argument("--kv-tokens", type=int, help="tokens of KV cache (default: the preset's)")
    made.add_argument(
        "--slow", type=float, default=1.0, help="factor on all step times (default %(default)s)"
    )


def device_of(args: argparse.Namespace) -> DeviceTime:
    """The device that the arguments describe; ValueError for one that cannot be."""
    checks.number(args.slow, "--slow", 1e-6, 1e6)
    if checks.integer(args.block_size, "--block-size", 16, 1 << 16) % 16:
        raise ValueError(f"--block-size must be a multiple of 16, got {args.block_size}")
    device = preset(args.preset).slowed(args.slow)
    tokens = device.kv_tokens if args.kv_tokens is None else args.kv_tokens
    if not 2 * args.block_size <= tokens <= MOST_TOKENS:
        raise ValueError(
            f"--kv-tokens must be two blocks ({2 * args.block_size}) to {MOST_TOKENS:,}, got {tokens}"
        )
    return replace(device, kv_tokens=tokens)


def check(args: argparse.Namespace) -> None:
    """See that the engines can be what they are told, and listen where. ValueError for the first thing that cannot."""
    checks.integer(args.engines, "--engines", 1, 4096)
    checks.integer(args.max_model_len, "--max-model-len", 1, MOST_TOKENS)
    checks.name(args.name, "--name")
    checks.host(args.host, "--host")
    device_of(args)
    if args.model is not None and not (args.model / "config.json").is_file():
        raise ValueError(f"--model {args.model}: expected a folder with tokenizer and config.json")
    checks.port(args.port, "--port")
    if args.port:
        checks.integer(args.port + args.engines - 1, "--port of the last engine", 1, 65535)
    for number in range(args.engines if args.port else 1):
        finding = free_port("engine", args.host, args.port + number)
        if finding.level is Level.FAIL:
            raise ValueError(f"--host, --port: {finding.text}")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    check(args)  # errors first
    from ..gateway.process import GATEWAY_ENV

    if any(os.environ.get(name) != value for name, value in GATEWAY_ENV.items()):
        # vLLM must come up on its CPU platform; what decides about that is read when Python starts.
        os.execve(sys.executable, [sys.executable, "-m", "npufleet.cluster.cli", *sys.argv[1:]],
                  {**os.environ, **GATEWAY_ENV})  # fmt: skip
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(serve(args))
    except OSError as error:
        print(f"npufleet: error: {error}", file=sys.stderr)
        return 2
    return 0


async def serve(args: argparse.Namespace) -> None:
    """Serve in the running loop; prints one line per engine once all take requests."""
    from ..gateway.process import prepare_process

    prepare_process()
    from ..engine.service import serve_engine
    from ..router.command import stop_asked
    from . import tokenizer
    from .engine import SimEngine
    from .scheduler import engine_config

    device, stop = device_of(args), stop_asked()
    with closing(Folder("npufleet-sims-")) as scratch:
        model = args.model or tokenizer.write(scratch.path / "model", args.max_model_len)
        engines, servers = [], []
        try:
            for number in range(args.engines):
                config = engine_config(
                    model, device, args.block_size, max_model_len=args.max_model_len, name=args.name,
                    events=_events(scratch.path / f"{number}"),
                )  # fmt: skip
                engines.append(SimEngine(config, device))
                port = args.port + number if args.port else 0
                servers.append(await serve_engine(engines[-1], args.host, port))
            for server in servers:
                print(f"simulated engine listens on {server.address}", flush=True)
            await stop.wait()
        finally:
            for server in servers:
                await server.stop()
            for engine in engines:
                engine.shutdown()


def _events(folder: Path) -> Any:
    from vllm.config.kv_events import KVEventsConfig

    folder.mkdir()
    return KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{folder}/events",
        replay_endpoint=f"ipc://{folder}/replay",
    )
