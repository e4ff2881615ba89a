"""Serve series over HTTP: a process's own on a Unix socket, those of all on a port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from npufleet.cluster.addresses import netloc


async def on_socket(where: Path, text: Callable[[], Awaitable[bytes]]) -> web.AppRunner:
    """Serve ``text()`` as ``/metrics`` on a Unix socket until the runner's cleanup."""
    runner = await _runner(text)
    await web.UnixSite(runner, str(where)).start()
    return runner


async def on_port(host: str, port: int, text: Callable[[], Awaitable[bytes]]) -> web.AppRunner:
    """The same on ``host`` and ``port`` (0: a free one). OSError where it cannot be had."""
    runner = await _runner(text)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise OSError(f"metrics cannot be served on {netloc(host, port)}: {error.strerror}") from error
    return runner


def port_of(runner: web.AppRunner) -> int:
    """The port that :func:`on_port` got."""
    return int(runner.addresses[0][1])


async def _runner(text: Callable[[], Awaitable[bytes]]) -> web.AppRunner:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(
            body=await text(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    return runner
