"""Run a gateway inside an event loop: no signal handler is installed and nothing outlives ``close()``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Generator, Iterable

import uvicorn

from ..router.picker import Picker
from .dispatch import Dispatcher
from .metrics import GatewayMetrics
from .settings import GatewaySettings, ModelSpec
from .slots import Slot

logger = logging.getLogger(__name__)

LINGER_S = 1.0
"""How long a gateway that leaves its port to others goes on with connections that are idle."""


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to whoever owns the process, and its clients in peace."""

    linger = 0.0  # seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port at once and idle connections a little later: until then an answer says that it is the last
        one of its connection, so that no client sends a request into one that closes."""
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()
        if self.linger:
            self.server_state.default_headers = [
                *self.server_state.default_headers,
                (b"connection", b"close"),
            ]
            deadline = time.monotonic() + self.linger
            while self.server_state.connections and time.monotonic() < deadline:  # noqa: ASYNC110 - as uvicorn waits
                await asyncio.sleep(0.02)
        await super().shutdown(sockets)


class Gateway:
    """A running gateway."""

    def __init__(
        self, picker: Picker, settings: GatewaySettings, sock: socket.socket, metrics: GatewayMetrics
    ) -> None:
        self.metrics = metrics
        self._picker = picker
        self._settings = settings
        self._slots: dict[str, Slot] = {}
        self._dispatcher = Dispatcher(self._slots, settings, metrics)
        self._socket = sock
        config = uvicorn.Config(
            self._dispatcher,
            loop="none",
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,  # ours tells more
            server_header=False,
            timeout_keep_alive=75,  # longer than clients keep a connection idle, so that they close it
            timeout_graceful_shutdown=max(1, round(settings.shutdown_grace)),
            **(settings.tls.uvicorn() if settings.tls is not None else {}),
        )
        self._server = _Server(config)
        self._server.linger = LINGER_S if settings.reuse_port else 0.0  # clients have somewhere else to go
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # of models that come or go

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Where clients find it, without a path."""
        host = self._settings.host
        scheme = "http" if self._settings.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the model deployments it serves."""
        return tuple(self._slots)

    def add_model(self, spec: ModelSpec) -> None:
        """Serve one more model deployment. Raises ``ValueError`` for a name that is taken."""
        if spec.name in self._slots:
            raise ValueError(f"this gateway already serves a model named {spec.name!r}")
        self._slots[spec.name] = Slot(spec, self._picker, self._settings, self.metrics)

    def retire_model(self, name: str) -> None:
        """Take no new request for ``name`` and let the running ones end within ``shutdown_grace``. Unknown
        names are ignored."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._leave(slot)

    def replace_model(self, spec: ModelSpec) -> None:
        """Serve a model deployment with other settings as soon as its new frontend is up; until then, and for
        the requests that run then, the old one goes on.
        """
        new = Slot(spec, self._picker, self._settings, self.metrics)
        task = asyncio.create_task(self._swap(new), name=f"gateway replaces {spec.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _swap(self, new: Slot) -> None:
        swapped = False
        try:
            await new.wait()
            old = self._slots.get(new.spec.name)
            if old is not None:  # otherwise it was removed meanwhile
                self._slots[new.spec.name] = new
                swapped = True
                self._leave(old)
        finally:
            if not swapped:
                await new.close()

    def _leave(self, slot: Slot) -> None:
        task = asyncio.create_task(slot.leave(), name=f"gateway drains {slot.spec.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def remove_model(self, name: str) -> None:
        """Stop serving ``name``; its running requests end with an error. Unknown names are ignored."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            await slot.close()

    @property
    def turned_away(self) -> dict[str, int]:
        """How many requests found no engine of their model so far."""
        return dict(self._dispatcher.turned_away)

    def series(self) -> bytes:
        """What /metrics answers."""
        return self._dispatcher.series()

    def alive(self) -> bool:
        """What /health answers: at least one model can answer requests now."""
        return self._dispatcher.alive()

    async def wait_ready(self, model: str) -> None:
        """Until ``model`` (which must have been added) can answer requests. Bound it with
        ``asyncio.timeout``."""
        await self._slots[model].wait()

    async def start(self) -> None:
        """Open the port to clients. Raises ``RuntimeError`` when the HTTP server does not come up."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="gateway http")
        while not self._server.started:
            if self._task.done():
                raise RuntimeError("the gateway's HTTP server did not start") from self._task.exception()
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Take no new connection, let running requests end within ``shutdown_grace``, then stop."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in list(self._slots):
            await self.remove_model(name)
        self._dispatcher.close()
        self._socket.close()


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A socket that may listen on the address; port 0 picks one, with ``reuse_port`` others may have it too.
    Raises ``OSError`` naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"the gateway cannot listen on {host}:{port}: {error.strerror}") from error
    sock.set_inheritable(False)
    return sock


async def serve_gateway(
    models: Iterable[ModelSpec],
    picker: Picker,
    settings: GatewaySettings | None = None,
    *,
    metrics: GatewayMetrics | None = None,
    warm: float = 0.0,
) -> Gateway:
    """Start a gateway in the running event loop and return it at once: models become ready as their engines
    do.

    With ``warm`` it listens once all models answer, after that many seconds at the latest: a gateway that shares a
    port must not take requests that others could answer. The process must have been prepared
    (``process.prepare_process``). The picker belongs to the caller.
    """
    settings = settings or GatewaySettings()
    sock = bind(settings.host, settings.port, reuse_port=settings.reuse_port)
    gateway = Gateway(picker, settings, sock, metrics or GatewayMetrics())
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(gateway.close)
        for spec in models:
            gateway.add_model(spec)
        if warm:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(warm):
                    await asyncio.gather(*map(gateway.wait_ready, gateway.models))
        await gateway.start()
        undo.pop_all()
    logger.info("gateway on %s", gateway.url)
    return gateway
