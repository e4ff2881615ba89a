"""A gateway alone, over a fixed list of engines: ``python -m npufleet.cluster.gateway --help``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from .. import checks
from ..engine import args as engine_args
from ..router.command import add_engines, endpoints, stop_asked
from ..tls import ServerTls
from ..transport.registry import DEFAULT_TRANSPORT, known_transports
from .process import GATEWAY_ENV, prepare_process
from .settings import GatewaySettings, ModelSpec


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m npufleet.cluster.gateway",
        description="Serve the OpenAI API over a fixed list of VllmEngine servers.",
    )
    add_engines(made)
    made.add_argument(
        "--args",
        type=json.loads,
        default={},
        metavar="JSON",
        help="vLLM arguments of every model, by their names",
    )
    made.add_argument(
        "--set",
        type=json.loads,
        default={},
        metavar="JSON",
        help="gateway settings by their names (settings.py)",
    )
    made.add_argument("--policy", default=None, help="routing policy (default: the router's)")
    made.add_argument(
        "--transport",
        default=DEFAULT_TRANSPORT,
        choices=known_transports(),
        help="gRPC client towards engines (default %(default)s)",
    )
    return made


def settings_of(options: argparse.Namespace) -> GatewaySettings:
    """What ``--set`` says. ValueError for a name or a value that is none, in ``--args`` too."""
    checks.mapping(options.args, "--args", engine_args.known())
    given = checks.mapping(options.set, "--set", [field.name for field in fields(GatewaySettings)])
    made: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
    if made.get("tls") is not None:
        known = [field.name for field in fields(ServerTls)]
        made["tls"] = ServerTls(**checks.mapping(made["tls"], "--set: tls", known))
    return GatewaySettings(**made)


async def run(options: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM."""
    settings = settings_of(options)
    engines = endpoints(options.engine, options.model)
    from ..router.pool import StaticSource
    from ..router.registry import DEFAULT_POLICY
    from ..router.server import serve_router
    from ..router.settings import WARM_SECONDS, RouterSettings
    from .server import serve_gateway

    stop = stop_asked()
    router = await serve_router(
        StaticSource(engines),
        policy=options.policy or DEFAULT_POLICY,
        settings=RouterSettings(transport=options.transport),
    )
    try:
        names = dict.fromkeys(engine.model for engine in engines)
        specs = [ModelSpec(name=name, args=options.args) for name in names]
        warm = WARM_SECONDS if settings.reuse_port else 0.0
        gateway = await serve_gateway(specs, router.picker, settings, warm=warm)
        print(f"gateway listens on {gateway.url}", flush=True)
        await stop.wait()
        await gateway.close()
    finally:
        await router.close(0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 2 for a command line that cannot be served."""
    options = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    os.environ.update(GATEWAY_ENV)
    try:
        prepare_process()
        import uvloop

        uvloop.run(run(options))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
