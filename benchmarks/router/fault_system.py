"""What the fault runs act on: engines and routers as processes, and wires between them that can be cut."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.router.mock_engine import MODEL
from benchmarks.router.paths import LOGS, ROOT, environment_of, free_port
from tests.fakes.tokenizer import make_tokenizer_dir


@dataclass(frozen=True, kw_only=True)
class Tested:
    """A router under test. ``command`` may name ``{port}``, ``{metrics}``, ``{tokenizer}`` and ``{listing}``."""

    name: str
    speaks: str  # grpc | http: what its clients speak
    engines: str = "grpc"  # and what it speaks to engines
    package: str = ""  # a requirement in an environment of its own
    command: str
    each: str = ""  # with {address}, once per engine
    shares: bool = False  # several of them share a port
    follows: bool = False  # it follows a list of engines


_OTHER = "--host 127.0.0.1 --port {port} --policy power_of_two --prometheus-port {metrics}"
TESTED = (
    Tested(
        name="npufleet router",
        speaks="grpc",
        command=f"-m npufleet.cluster.cli route --model {MODEL} --port {{port}} --reuse-port "
        "--policy least-load --engines-file {listing}",
        shares=True,
        follows=True,
    ),
    Tested(
        name="npufleet gateway",
        speaks="http",
        command=f"-m npufleet.cluster.gateway --model {MODEL} --policy least-load "
        '--set {{"port":{port},"reuse_port":true}} --engine {address} --engine {address} --engine {address}',
        shares=True,
    ),
    Tested(
        name="smg 1.13.0",
        speaks="http",
        package="smg==1.13.0",
        command=f"smg launch {_OTHER} --model-path {{tokenizer}} --log-level warn --worker-urls",
        each="grpc://{address}",
    ),
    Tested(
        name="vllm-router 0.1.17",
        speaks="http",
        engines="http",
        package="vllm-router==0.1.17",
        command=f"vllm-router {_OTHER} --worker-urls",
        each="http://{address}",
    ),
    Tested(
        name="sglang-router 0.3.2",
        speaks="http",
        engines="http",
        package="sglang-router==0.3.2",
        command=f"sglang-router launch {_OTHER} --worker-urls",
        each="http://{address}",
    ),
)


class Process:
    """A program that can be killed, stopped and started again; its output goes to ``log``."""

    def __init__(self, log: Path, *command: str) -> None:
        self._command = command
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(log, "ab")  # noqa: SIM115 - it is the process's as long as this lives
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdout=self._log,
            stderr=self._log,
            cwd=ROOT,
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    async def end(self) -> None:
        """Kill it, in whatever state it is."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class Wire:
    """A TCP relay before one engine that can be cut: bytes then go nowhere and connections stay open."""

    def __init__(self, port: int) -> None:
        self.address = ""
        self._port = port
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Let nothing through."""
        self._open.clear()

    def mend(self) -> None:
        """Let everything through again."""
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        try:
            there = await asyncio.open_connection("127.0.0.1", self._port)
        except ConnectionError:
            writer.close()
            return
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._copy(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._open.wait()
                if sink.is_closing():  # uvloop takes a write then for a fault of the program
                    break
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()


@dataclass
class System:
    """Three engines, the wire before the first one, routers on one port, and the list of engines."""

    engines: list[Process]
    wire: Wire
    routers: list[Process]
    address: str
    listing: Path


def _program(tested: Tested, addresses: list[str], values: dict[str, object]) -> list[str]:
    """The command line of ``tested``; each ``{address}`` in its command is the next engine's."""
    left = iter(addresses)
    words = []
    for word in tested.command.split():
        words.append(next(left) if word == "{address}" else word.format(**values))
    if tested.each:
        words += [tested.each.format(address=address) for address in addresses]
    if not tested.package:
        return [sys.executable, *words]
    return [str(environment_of(tested.package) / words[0]), *words[1:]]


@asynccontextmanager
async def system(tested: Tested, routers: int) -> AsyncIterator[System]:
    """Everything started; the routers may not be ready yet."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="npufleet-faults-")))
        tokenizer = make_tokenizer_dir(folder / "tokenizer")
        engines, ports = [], []
        for letter in "ABC":
            ports.append({"grpc": free_port(), "http": free_port()})
            numbers = [str(ports[-1][kind]) for kind in ("grpc", "http")]
            command = ["-m", "benchmarks.router.fault_engine", *numbers, letter, str(tokenizer)]
            engine = Process(LOGS / f"fault-engine-{letter}.log", sys.executable, *command)
            stack.push_async_callback(engine.end)
            await engine.start()
            engines.append(engine)
        wire = Wire(ports[0][tested.engines])
        await wire.start()
        addresses = [wire.address, *(f"127.0.0.1:{each[tested.engines]}" for each in ports[1:])]
        for each in ports:
            await _listens(each["http"])
        listing = folder / "engines"
        listing.write_text("\n".join(addresses))
        port = free_port()
        values = {"port": port, "metrics": free_port(), "tokenizer": tokenizer, "listing": listing}
        log = LOGS / f"faults-{tested.name.replace(' ', '-')}.log"
        made = [Process(log, *_program(tested, addresses, values)) for _ in range(routers)]
        for router in made:
            stack.push_async_callback(router.end)
            await router.start()
        yield System(engines, wire, made, f"127.0.0.1:{port}", listing)


async def _listens(port: int) -> None:
    """Until something listens there; an engine binds its HTTP port last."""
    async with asyncio.timeout(60):
        while True:
            try:
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                return
            except ConnectionError:
                await asyncio.sleep(0.1)
