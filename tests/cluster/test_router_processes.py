"""Several router processes on one port: each serves, one's death is its own, their series are read at one place."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from smg_grpc_proto import vllm_engine_pb2_grpc

from npufleet.cluster.admission.settings import AdmissionSettings
from npufleet.cluster.router.processes.metrics import merge
from npufleet.cluster.router.processes.setup import Setup
from npufleet.cluster.router.processes.supervisor import RouterProcesses, hold_port
from npufleet.cluster.tls import ServerTls
from npufleet.cluster.transport.base import Tls

from .router_fakes import MODEL, FakeEngine, ListSource, endpoint, generate_request, until


class Stream:
    """A long Generate on a connection of its own, so that the kernel chooses a process for it."""

    def __init__(self, channel: grpc.aio.Channel, call) -> None:
        self.channel, self.call, self.tokens = channel, call, 0
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, address: str, number: int) -> Stream:
        options = [("grpc.use_local_subchannel_pool", 1), ("npufleet.test", number)]
        channel = grpc.aio.insecure_channel(address, options=options)
        call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(
            generate_request(5000), wait_for_ready=True
        )
        stream = cls(channel, call)
        await until(lambda: stream.tokens, 20)
        return stream

    @property
    def done(self) -> bool:
        return self._task.done()

    async def close(self) -> None:
        self.call.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.channel.close()

    async def _read(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            async for answer in self.call:
                self.tokens += len(answer.chunk.token_ids)


async def heard_of(running: RouterProcesses, engine: str) -> None:
    """Until both processes say that the engine is ready."""
    async with asyncio.timeout(20):
        while True:
            text = await running.metrics()
            ready = total(text, "npufleet_router_engine_state", engine=engine, state="ready")
            if ready == {"0": 1.0, "1": 1.0}:
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def processes(source: ListSource, number: int = 2):
    running = RouterProcesses(source, Setup(host="127.0.0.1", port=0, policy="round-robin"), number)
    try:
        await running.start()
        yield running
    finally:
        await running.close(1.0)


def total(text: bytes, name: str, **labels: str) -> dict[str, float]:
    """A series' value by process."""
    return {
        sample.labels["process"]: sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    }


async def test_each_serves_one_dies_alone_and_all_are_measured():
    engine = await FakeEngine(name="a", delay=0.02).start()
    late = await FakeEngine(name="b").start()
    source = ListSource(endpoint(engine))
    try:
        async with processes(source) as running:
            await heard_of(running, "a")
            streams = []
            for number in range(64):  # until both have one
                streams.append(await Stream.open(running.address, number))
                by = total(await running.metrics(), "npufleet_router_in_flight", model=MODEL)
                if len(by) == 2 and all(by.values()):
                    break
            assert sum(by.values()) == len(streams) and all(by.values()), by
            os.kill(running.pids[0], signal.SIGKILL)
            await until(lambda: sum(stream.done for stream in streams) == by["0"])
            alive = [stream for stream in streams if not stream.done]
            assert len(alive) == by["1"]
            for stream in streams:
                if stream.done:
                    assert await stream.call.code() is grpc.StatusCode.UNAVAILABLE
            seen = [stream.tokens for stream in alive]
            await until(lambda: all(s.tokens > was for s, was in zip(alive, seen, strict=True)))  # they go on
            after = await Stream.open(running.address, 99)
            await until(lambda: running.restarts == 1 and len(running.pids) == 2, 30)
            source.put(endpoint(late))  # all hear of what changes, the new one too
            await heard_of(running, "b")
            for stream in (*streams, after):
                await stream.close()
    finally:
        await engine.stop()
        await late.stop()


async def test_a_process_that_cannot_serve_is_said_at_once():
    wrong = Setup(host="127.0.0.1", port=0, policy="no-such-policy")
    with pytest.raises(OSError, match="ended with 2 while it started"):
        await RouterProcesses(ListSource(), wrong, 1).start()


def test_a_port_that_others_hold_is_refused():
    held = hold_port("127.0.0.1", 0)
    held.listen()
    try:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            with pytest.raises(OSError, match="cannot listen on"):
                hold_port("127.0.0.1", other.getsockname()[1])
    finally:
        held.close()


def test_a_setup_comes_out_of_the_pipe_as_it_went_in(tmp_path):
    setup = Setup(
        host="0.0.0.0",
        port=7,
        admission=AdmissionSettings(ttft_objective=1.5),
        keys="/keys",
        secret="/secret",
        tls=ServerTls(certificate="/c", key="/k"),
        engine_tls=Tls(ca=tmp_path / "ca", server_name="engine"),
    )
    assert Setup.from_line(setup.to_line()) == setup
    assert setup.to_line().count(b"\n") == 1


def test_series_of_processes_stay_apart_and_keep_their_kind():
    one = '# HELP x_total help\n# TYPE x_total counter\nx_total{a="1"} 2\n'
    merged = merge({"0": one, "1": one.replace(" 2\n", " 3\n")}).decode()
    assert merged.count("# TYPE x_total counter") == 1
    assert 'x_total{a="1",process="0"} 2.0' in merged
    assert 'x_total{a="1",process="1"} 3.0' in merged
