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
from npufleet.cluster.router.base import LoadReport
from npufleet.cluster.router.ledger import NOTHING, Ledger, Share
from npufleet.cluster.router.processes.metrics import merge
from npufleet.cluster.router.processes.setup import Setup
from npufleet.cluster.router.processes.shares import ShareTable, Slots, create
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
        resume="all",
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


def test_what_others_have_is_seen_at_once_and_goes_with_them(tmp_path):
    file = tmp_path / "shares"
    create(file, 3)
    now = [0.0]
    tables = [ShareTable(file, 3, row, lambda: now[0]) for row in range(3)]
    slots = Slots()
    for table in tables:
        table.assign(slots.update({"a", "b"}))
    tables[0].tell("a", Share(2, 1, 100, 5e9))
    tables[1].tell("a", Share(1, 1, 50, 1.0))
    tables[1].tell("unknown", Share(9, 9, 9, 9.0))
    assert tables[2].others("a") == Share(3, 2, 150, 5e9 + 1)
    assert tables[0].others("a") == Share(1, 1, 50, 1.0)
    assert tables[0].others("b") == tables[0].others("unknown") == NOTHING
    now[0] += 1
    tables[2].clear(1)  # its process has died
    assert tables[0].others("a") == NOTHING
    for table in tables:
        table.assign(slots.update({"b", "c"}))
    now[0] += 1
    tables[0].tell("a", Share(7, 7, 7, 7.0))  # the end of one that ran on an engine that has left
    assert all(table.others(e) == NOTHING for table in tables for e in "abc")


def test_places_are_used_again_as_late_as_can_be():
    slots = Slots(3)
    assert slots.update({"a", "b"}) == {"a": 0, "b": 1}
    assert slots.update({"b", "c"}) == {"b": 1, "c": 2}
    assert slots.update({"b", "c", "d"}) == {"b": 1, "c": 2, "d": 0}
    assert slots.update({"b", "c", "d", "e"}) == {
        "b": 1,
        "c": 2,
        "d": 0,
    }  # no place left: it is told of by none


def test_a_ledger_counts_what_others_have_as_its_own_where_it_decides():
    others, told = [Share(2, 1, 100, 5.0)], []
    now = [0.0]
    ledger = Ledger("a", lambda: now[0], lambda: others[0], told.append)
    ledger.sent(10)
    assert told[-1] == ledger.share() == Share(1, 1, 10, 0.0)
    load = ledger.load(5.0)
    assert (load.in_flight, load.queued, load.queued_tokens, load.queued_pairs) == (3, 2, 110, 5.0)
    ledger.take(LoadReport(running=3, waiting_tokens=20), ledger.mark())
    others[0] = Share(3, 2, 400, 5.0)  # one more since that report
    load = ledger.load(5.0)
    assert (load.requests_since, load.tokens_since) == (1, 300)
    assert load.requests() == 4 and load.waiting_tokens() == 410
    assert ledger.in_flight == 1  # what is its own stays its own
    ledger.ended(10, started=False)
    assert told[-1] == NOTHING


async def test_processes_spread_a_burst_as_one_router_would():
    """Each alone would send its first requests to the same idle engine."""
    engines = [await FakeEngine(name=name, delay=30).start() for name in "abcd"]
    source = ListSource(*map(endpoint, engines))
    running = RouterProcesses(source, Setup(host="127.0.0.1", port=0, policy="least-load"), 2)
    streams = []
    try:
        await running.start()
        for name in "abcd":
            await heard_of(running, name)
        for number in range(16):
            options = [("grpc.use_local_subchannel_pool", 1), ("npufleet.test", number)]
            channel = grpc.aio.insecure_channel(running.address, options=options)
            call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(generate_request(5))
            streams.append((channel, call))
            await until(lambda n=number: sum(len(engine.seen) for engine in engines) == n + 1)
        by = total(await running.metrics(), "npufleet_router_in_flight", model=MODEL)
        assert len(by) == 2 and all(by.values()), by
        assert [len(engine.seen) for engine in engines] == [4, 4, 4, 4]
    finally:
        for channel, call in streams:
            call.cancel()
            await channel.close()
        await running.close(1.0)
        for engine in engines:
            await engine.stop()
