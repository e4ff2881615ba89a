"""What the command lines of a router alone and of a gateway alone share: a fixed list of engines, a clean stop."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Sequence

from ..endpoints import EngineEndpoint, EngineState


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Add ``--engine`` and ``--model``, which :func:`endpoints` reads."""
    parser.add_argument(
        "--engine",
        action="append",
        required=True,
        metavar="[MODEL@]HOST:PORT",
        help="an engine's gRPC address; repeat it for each engine",
    )
    parser.add_argument("--model", help="the model of engines given without MODEL@")


def endpoints(engines: Sequence[str], model: str | None) -> list[EngineEndpoint]:
    """The endpoints that ``--engine`` and ``--model`` describe; ValueError for what does not parse."""
    made = []
    for text in engines:
        name, _, address = text.rpartition("@")
        name = name or (model or "")
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"--engine {text!r} is not [MODEL@]HOST:PORT")
        if not name:
            raise ValueError(f"--engine {text!r} has no model; write MODEL@{text} or give --model")
        made.append(
            EngineEndpoint(
                engine_id=address, model=name, address=address, metrics_url="", state=EngineState.READY
            )
        )
    if len({endpoint.engine_id for endpoint in made}) < len(made):
        raise ValueError("an engine is given twice")
    return made


def stop_asked() -> asyncio.Event:
    """An event of the running loop that SIGINT and SIGTERM set."""
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    return asked
