"""Faults under load: what clients of the router notice when an engine dies, freezes, slows down or is cut off.

``python -m benchmarks.router.faults`` starts three engines without a model (``tests/cluster/router_fakes.py``) and
``npufleet route``, each a process of its own, keeps 32 streams of 40 tokens running through them, and does one thing to
the system after two seconds. Each answer is checked token by token. A stream that had begun on the engine in question
cannot go on elsewhere; every other failure is counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import uvloop
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from tests.cluster.router_fakes import generate_request

ROOT = Path(__file__).resolve().parents[2]
STREAMS, TOKENS = 32, 40
FAULT_AT, HEAL_AT, END_AT = 2.0, 12.0, 18.0  # seconds


@dataclass
class Notes:
    """What the clients saw. Times are seconds since the start."""

    start: float = field(default_factory=time.monotonic)
    whole: list[tuple[float, str]] = field(default_factory=list)  # when it ended, on which engine
    broken: list[float] = field(default_factory=list)  # streams that had begun
    failed: list[tuple[float, str]] = field(default_factory=list)  # calls that had not
    wrong: int = 0  # answers with a token that is not the right one
    slowest: float = 0.0  # seconds of the longest whole answer that began before healing

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start


class Process:
    """A program that can be killed, stopped and started again."""

    def __init__(self, *command: str) -> None:
        self.command = command
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """Start it; returns the last word of its first line."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self.command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        return (await asyncio.wait_for(self._process.stdout.readline(), 60)).decode().split()[-1]

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
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()


@dataclass
class System:
    """Engines, the wire before the first one, routers and the engines' list."""

    engines: list[Process]
    wire: Wire
    routers: list[Process]
    address: str
    listing: Path


Action = Callable[[System], Awaitable[None]]


def _signal(number: signal.Signals) -> Action:
    async def act(system: System) -> None:
        system.engines[0].send(number)

    return act


async def _restart(system: System) -> None:
    await system.engines[0].start()


async def _cut(system: System) -> None:
    system.wire.cut()


async def _mend(system: System) -> None:
    system.wire.mend()


async def _hide(system: System) -> None:
    system.listing.rename(system.listing.with_suffix(".away"))


async def _show(system: System) -> None:
    system.listing.with_suffix(".away").rename(system.listing)


async def _kill_router(system: System) -> None:
    system.routers[0].send(signal.SIGKILL)


async def _start_router(system: System) -> None:
    await system.routers[0].start()


FAULTS: dict[str, tuple[Action, Action]] = {
    "engine killed": (_signal(signal.SIGKILL), _restart),
    "engine paused (SIGSTOP)": (_signal(signal.SIGSTOP), _signal(signal.SIGCONT)),
    "engine 50 times slower": (_signal(signal.SIGUSR1), _signal(signal.SIGUSR2)),
    "network to an engine cut": (_cut, _mend),
    "registry away": (_hide, _show),
    "one of two routers killed": (_kill_router, _start_router),
}


def free_port() -> int:
    """A port that nobody holds now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def system(routers: int, policy: str) -> AsyncIterator[System]:
    """Everything up."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="npufleet-faults-")))
        engines, addresses = [], []
        for number in range(3):
            port = free_port()
            engine = Process("-m", "tests.cluster.router_fakes", str(port), f"engine-{number}")
            stack.push_async_callback(engine.end)
            await engine.start()
            engines.append(engine)
            addresses.append(f"127.0.0.1:{port}")
        wire = Wire(int(addresses[0].rpartition(":")[2]))
        await wire.start()
        listing = folder / "engines"
        listing.write_text("\n".join([wire.address, *addresses[1:]]))
        port = free_port()
        command = ["-m", "npufleet.cluster.cli", "route", "--model", "m", "--port", str(port), "--reuse-port"]
        made = [Process(*command, "--policy", policy, "--engines-file", str(listing)) for _ in range(routers)]
        for router in made:
            stack.push_async_callback(router.end)
            await router.start()
        await asyncio.sleep(2)
        yield System(engines, wire, made, f"127.0.0.1:{port}", listing)


async def client(address: str, number: int, notes: Notes) -> None:
    """One stream after the other until the end, on a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
    options += [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.min_reconnect_backoff_ms", 50)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        round_ = 0
        while notes.now() < END_AT:
            round_ += 1
            prompt = (number * 1000 + round_, 7)
            call, got, begun = (
                stub.Generate(generate_request(TOKENS, prompt, ""), timeout=30),
                [],
                notes.now(),
            )
            try:
                while (answer := await call.read()) is not grpc.aio.EOF:
                    got += answer.chunk.token_ids
                engine = dict(await call.initial_metadata()).get("x-fake", "")
                notes.whole.append((notes.now(), engine))
                if begun < HEAL_AT:
                    notes.slowest = max(notes.slowest, notes.now() - begun)
                notes.wrong += got != [(sum(prompt) + i) % 50000 for i in range(TOKENS)]
            except grpc.aio.AioRpcError as error:
                notes.wrong += got != [(sum(prompt) + i) % 50000 for i in range(len(got))]
                if got:
                    notes.broken.append(notes.now())
                else:
                    notes.failed.append((notes.now(), f"{error.code().name}: {error.details()}"))
                    await asyncio.sleep(0.05)


async def run(name: str, policy: str) -> str:
    """One fault; returns its row of the table."""
    fault, heal = FAULTS[name]
    async with system(2 if "router" in name else 1, policy) as made:
        notes = Notes()
        clients = [asyncio.create_task(client(made.address, i, notes)) for i in range(STREAMS)]
        await asyncio.sleep(FAULT_AT)
        await fault(made)
        await asyncio.sleep(HEAL_AT - FAULT_AT)
        await heal(made)
        healed = notes.now()
        await asyncio.gather(*clients)
    errors = [at for at in (*notes.broken, *(at for at, _ in notes.failed)) if at >= FAULT_AT]
    quiet = max(errors) - FAULT_AT if errors else 0.0
    back = [at for at, engine in notes.whole if engine == "engine-0" and at > healed]
    during = sum(engine == "engine-0" and FAULT_AT + 1 < at < healed for at, engine in notes.whole)
    for at, text in notes.failed[:3]:
        print(f"  {at:.2f} s: {text}", file=sys.stderr)
    return (
        f"| {name} | {len(notes.whole)} | {notes.wrong} | {len(notes.broken)} | {len(notes.failed)} "
        f"| {quiet:.1f} s | {notes.slowest:.1f} s | {during} | {f'{min(back) - healed:.1f} s' if back else '-'} |"
    )


async def main(names: list[str], policy: str) -> None:
    """Run the faults and print the table."""
    print(
        "| fault | whole answers | wrong | streams broken off | other errors | last error after "
        "| slowest whole answer | answers of the engine meanwhile | its first answer after healing |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        print(await run(name, policy), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--policy", default="least-load")
    arguments = parser.parse_args()
    uvloop.run(main(arguments.only, arguments.policy))
