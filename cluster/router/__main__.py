"""A router alone, over a fixed list of engines: ``python -m npufleet.cluster.router --help``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, start_http_server

from npufleet.cluster.router.command import add_engines, endpoints, stop_asked
from npufleet.cluster.router.pool import StaticSource
from npufleet.cluster.router.registry import DEFAULT_POLICY, known_policies
from npufleet.cluster.router.server import serve_router
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.transport.registry import DEFAULT_TRANSPORT, known_transports


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m npufleet.cluster.router",
        description="Route vllm.grpc.engine.VllmEngine calls over a fixed list of engines.",
    )
    add_engines(made)
    made.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    made.add_argument("--port", type=int, default=50050, help="gRPC port, 0 = any (default %(default)s)")
    names = ", ".join(known_policies())
    made.add_argument("--policy", default=DEFAULT_POLICY, help=f"{names} (default %(default)s)")
    made.add_argument(
        "--transport",
        default=DEFAULT_TRANSPORT,
        choices=known_transports(),
        help="gRPC client towards engines (default %(default)s)",
    )
    made.add_argument("--metrics-port", type=int, help="serve Prometheus metrics here, on the same address")
    made.add_argument("--grace", type=float, default=30.0, help="seconds for running calls to end on SIGTERM")
    return made


async def run(args: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM."""
    source = StaticSource(endpoints(args.engine, args.model))
    registry = CollectorRegistry()
    stop = stop_asked()
    settings = RouterSettings(transport=args.transport)
    handle = await serve_router(
        source,
        host=args.host,
        port=args.port,
        policy=args.policy,
        registry=registry,
        settings=settings,
    )
    if args.metrics_port is not None:
        start_http_server(args.metrics_port, addr=args.host, registry=registry)
    print(f"router listens on {handle.address}", flush=True)
    await stop.wait()
    await handle.close(args.grace)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 2 for a command line that cannot be served."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        try:
            import uvloop
        except ImportError:  # a faster loop where it is installed, nothing else
            asyncio.run(run(args))
        else:
            uvloop.run(run(args))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
