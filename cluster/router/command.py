"""What the command lines of a router alone and of a gateway alone share: a fixed list of engines, a clean stop."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Sequence

from ..endpoints import EngineEndpoint
from .sources import endpoints_of


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Add ``--engine`` and ``--model``, which :func:`endpoints` reads."""
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="[MODEL@][grpc://]HOST:PORT",
        help="an engine's gRPC address; repeat it for each engine",
    )
    parser.add_argument("--model", help="the model of engines given without MODEL@ (default: they are asked)")


def endpoints(engines: Sequence[str], model: str | None) -> list[EngineEndpoint]:
    """The endpoints that ``--engine`` and ``--model`` describe; ValueError for what does not parse."""
    made = endpoints_of(engines, model or "")
    if not made:
        raise ValueError("no engine is given: --engine [MODEL@]HOST:PORT")
    for endpoint in made:
        if not endpoint.model:
            raise ValueError(
                f"--engine {endpoint.address!r} has no model; write MODEL@{endpoint.address} or give --model"
            )
    return made


def stop_asked() -> asyncio.Event:
    """An event of the running loop that SIGINT and SIGTERM set."""
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    return asked
