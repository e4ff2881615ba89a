"""One router process: ``python -m npufleet.cluster.router.processes.child METRICS_SOCKET``.

It reads its setup and then sets of engines from its standard input, and says ``ready`` on its standard output. It
ends on SIGTERM, and when its input ends, because then its parent is gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from npufleet.cluster.admission.tenants import Keys, read_key_file
from npufleet.cluster.controller.wire import snapshot_from_dict
from npufleet.cluster.endpoints import Snapshot
from npufleet.cluster.router.command import stop_asked
from npufleet.cluster.router.lookaside.tokens import read_secret
from npufleet.cluster.router.processes.exporter import on_socket
from npufleet.cluster.router.processes.setup import Setup
from npufleet.cluster.router.processes.shares import ShareTable
from npufleet.cluster.router.server import serve_router
from npufleet.cluster.router.settings import RouterSettings

_LINE_LIMIT = 64 << 20  # bytes of one set of engines


class ParentSource:
    """The engines that the parent tells, and their places in ``table``."""

    def __init__(self, reader: asyncio.StreamReader, table: ShareTable, gone: asyncio.Event) -> None:
        self._table = table
        self._reader = reader
        self._gone = gone

    async def watch(self) -> AsyncIterator[Snapshot]:
        """Yield each set as it comes."""
        while line := await self._reader.readline():
            told = json.loads(line)
            self._table.assign(told["slots"])
            yield snapshot_from_dict(told["snapshot"])
        self._gone.set()
        await asyncio.Event().wait()


async def serve(metrics_socket: Path) -> None:
    """Serve until SIGINT, SIGTERM or the parent's end."""
    stop = stop_asked()
    reader = asyncio.StreamReader(limit=_LINE_LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    setup = Setup.from_line(await reader.readline())
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    table = ShareTable(Path(setup.shares), setup.rows, setup.row)
    handle = await serve_router(
        ParentSource(reader, table, stop),
        host=setup.host,
        port=setup.port,
        policy=setup.policy,
        registry=registry,
        settings=RouterSettings(
            transport=setup.transport,
            front=setup.front,
            tls=setup.engine_tls,
            admission=setup.admission,
            split_tokens=setup.split_tokens,
            hedging=setup.hedging,
            resume=setup.resume,
            access_log=setup.access_log,
            otlp_endpoint=setup.otlp_endpoint,
            secret=read_secret(setup.secret) if setup.secret else None,
        ),
        reuse_port=True,
        warm=setup.warm,
        peers=table,
        keys=Keys(read_key_file(setup.keys, "API keys")),
        tls=setup.tls,
    )

    async def series() -> bytes:
        return generate_latest(registry)

    runner = await on_socket(metrics_socket, series)
    print("ready", flush=True)
    await stop.wait()
    await handle.close(setup.grace)
    await runner.cleanup()


def main() -> int:
    """Run it; 2 for what cannot be served."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s [{Path(sys.argv[1]).stem}] %(message)s"
    )
    import uvloop

    try:
        uvloop.run(serve(Path(sys.argv[1])))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
