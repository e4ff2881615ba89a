"""Tokens of plain streams that go straight to their client's connection: nothing is lost, doubled or overtaken."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from npufleet.cluster.gateway import heap
from npufleet.cluster.gateway.client import FleetClient
from npufleet.cluster.gateway.metrics import GatewayMetrics, ModelStats
from npufleet.cluster.gateway.outlet import OUTLET, outlet_under
from npufleet.cluster.gateway.plain import PlainChat, PlainCompletion
from npufleet.cluster.router import member
from tests.fakes.tokenizer import make_tokenizer_dir

from . import test_router_resume
from .router_fakes import MODEL, until
from .test_gateway_plain import BASE
from .test_gateway_resume import Gateway, gateway
from .test_gateway_translate import core_request
from .test_router_resume import LENGTH, PROMPT, Chain, engines, positions, ready, resumed


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(make_tokenizer_dir(tmp_path_factory.mktemp("t") / "tokenizer"))


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of which each token has a text and its time; engines that come back at once; one moment in all events."""
    usual = test_router_resume.next_token
    monkeypatch.setattr(test_router_resume, "next_token", lambda ids: usual(ids) % 250)
    at_once = Chain._break_at

    async def paced(self: Chain, where: int | str, context: Any) -> None:
        if isinstance(where, int) and where > len(PROMPT):
            await asyncio.sleep(0.004)  # tokens that come together take the usual way together
        await at_once(self, where, context)

    monkeypatch.setattr(Chain, "_break_at", paced)
    monkeypatch.setattr(member, "_LONGEST_HOLD", 0.05)
    monkeypatch.setattr(chat_serving.time, "time", lambda: 1234567890.5)


class Wire:
    """A client's connection, and what came over it; ``full``: whether it takes more at the moment, asked each time."""

    def __init__(self, full: Any = lambda: False) -> None:
        self.events: list[str] = []
        self.short = 0
        self.bodies = 0
        self._full = full

    @property
    def open(self) -> bool:
        return not self._full()

    def write(self, data: bytes) -> None:
        self.short += 1
        self.events.append(data.decode())

    def told(self) -> tuple[str, list[dict]]:
        """The text of all events, and the events without it."""
        events = "".join(self.events).removesuffix("\n\n").split("\n\n")
        made = [json.loads(event.removeprefix("data: ")) for event in events if "[DONE]" not in event]
        text, rest = "", []
        for event in made:
            for choice in event.get("choices", ()):
                part = choice.get("delta", choice)
                text += part.pop("content", None) or part.pop("text", None) or ""
            if event not in rest:  # how many tokens make one event is a matter of time
                rest.append(event)
        return text, rest


class Front:
    """vLLM's frontend over the gateway's engine core, from its request to the events of a stream."""

    def __init__(self, g: Gateway, tokenizer: Any) -> None:
        self.gateway = g
        self.metrics = GatewayMetrics()
        self.shortcuts = True
        none: Any = None
        parts = SimpleNamespace(model_config=none, scheduler_config=none, observability_config=none)
        renderer = SimpleNamespace(tokenizer=tokenizer, mm_processor_cache=None, stat_mm_cache=lambda: None)
        config: Any = parts
        self.client = FleetClient(config, renderer, none, g.core, ModelStats(MODEL, self.metrics))  # type: ignore[arg-type]

    async def _outputs(self, params: SamplingParams, pairs: bool) -> AsyncIterator[Any]:
        request = core_request(params, list(PROMPT))
        request.external_req_id = "r"
        queue = RequestOutputCollector(params.output_kind, "r")
        self.client.output_processor.add_request(request, "x", None, 0, queue)
        await self.gateway.core.add_request_async(request)
        finished = False
        while not finished:
            output = queue.get_nowait() or await queue.get()
            finished = output.finished
            yield (0, output) if pairs else output

    async def ask(self, wire: Wire | None, *breaks: int | str, chat: bool = True, **params: Any) -> Wire:
        """One stream; without ``wire`` it takes vLLM's way alone."""
        await ready(self.gateway.fleet)
        await until(lambda: self.gateway.core.active == 0)  # all requests have one name
        self.gateway.fleet.engines[0].breaks[:] = positions(*breaks)
        made = SamplingParams(
            **{"temperature": 0.0, "max_tokens": LENGTH, "output_kind": RequestOutputKind.DELTA, **params}
        )
        kind: Any = PlainChat if chat else PlainCompletion
        serving = kind.__new__(kind)
        serving.__dict__.update({**BASE, "engine_client": self.client, "shortcuts": self.shortcuts})
        metadata = SimpleNamespace()
        token = OUTLET.set(wire)  # type: ignore[arg-type]
        if chat:
            asked = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
            results = self._outputs(made, False)
            stream = serving.chat_completion_stream_generator(asked, results, "c", "m", [], None, metadata)
        else:
            again = CompletionRequest(model="m", prompt="x", stream=True)
            results = self._outputs(made, True)
            stream = serving.completion_stream_generator(
                again, [{}], results, "c", 1, "m", num_prompts=1, tokenizer=None, request_metadata=metadata
            )
        OUTLET.reset(token)
        got = wire or Wire()
        async for event in stream:
            got.events.append(event)
            got.bodies += 1
            if got.bodies % 3 == 0:
                await asyncio.sleep(0)  # the connection is full for a moment
        got.usage = getattr(metadata, "final_usage_info", None)  # type: ignore[attr-defined]
        return got


@asynccontextmanager
async def front(tokenizer: Any, *chains: Any) -> AsyncIterator[Front]:
    async with gateway(*chains) as g:
        made = Front(g, tokenizer)
        try:
            yield made
        finally:
            assert made.client.output_handler is not None
            made.client.output_handler.cancel()
            made.client.renderer.shutdown = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("chat", [True, False])
async def test_a_stream_is_that_of_the_usual_way_wherever_it_breaks(tokenizer: Any, chat: bool):
    async with front(tokenizer, *engines(3)) as f:
        usual = await f.ask(None, chat=chat)
        assert usual.short == 0
        before = f.metrics.generation_tokens.labels(MODEL)._value.get()
        short = 0
        for where in ((), (1,), (2,), (4,), (LENGTH - 1,), (3, 5), ("end",)):
            wire = await f.ask(Wire(), *where, chat=chat)
            assert wire.told() == usual.told(), where
            assert str(wire.usage) == str(usual.usage)  # type: ignore[attr-defined]
            short += wire.short
            after = f.metrics.generation_tokens.labels(MODEL)._value.get()
            assert after - before == LENGTH, "each token is counted once"
            before = after
        assert short > 0 and resumed(f.gateway.fleet, "resumed") >= 5


async def test_nothing_overtakes_anything_on_a_connection_that_is_full_at_times(tokenizer: Any):
    chance = random.Random(3)
    many = {"max_tokens": 60}
    async with front(tokenizer, *engines(1, per_message=1)) as f:
        usual = await f.ask(None, **many)
        ways = set()
        for _ in range(6):
            wire = await f.ask(Wire(lambda: chance.random() < 0.3), **many)
            assert wire.told() == usual.told()
            ways.add((wire.short > 0, wire.bodies > 4))
        assert (True, True) in ways, "both ways were taken in one stream"


def ends(wire: Wire) -> tuple[str, list[dict]]:
    """As told, without the events between the first one and the last: how many there are is a matter of time."""
    text, events = wire.told()
    return text, [each for each in events if "role" in str(each) or each["choices"][0]["finish_reason"]]


async def test_random_streams_are_those_of_the_usual_way(tokenizer: Any):
    async with front(tokenizer, *engines(3)) as f:
        short = 0
        for seed in range(14):
            chance = random.Random(seed)
            for engine in f.gateway.fleet.engines:
                engine.per_message = chance.choice([1, 1, 2, 5])
            params = {
                "max_tokens": chance.randint(1, 40),
                "min_tokens": chance.choice([0, 0, 1]),
                "skip_special_tokens": chance.random() < 0.5,
                "spaces_between_special_tokens": chance.random() < 0.5,
                "stop": chance.choice([[], [], ["e"], ["never said"]]),
                "stop_token_ids": chance.choice([[], [], [chance.randrange(250)]]),
                "chat": chance.random() < 0.5,
            }
            usual = await f.ask(None, **params)
            fullness = chance.choice([0.0, 0.0, 0.2])
            breaks = sorted(chance.sample(range(1, 40), chance.randint(0, 2)))
            wire = Wire(lambda chance=chance, fullness=fullness: chance.random() < fullness)  # type: ignore[misc]
            await f.ask(wire, *breaks, **params)
            assert ends(wire) == ends(usual), (seed, params, breaks)
            assert str(wire.usage) == str(usual.usage), (seed, params, breaks)  # type: ignore[attr-defined]
            short += wire.short
        assert short > 0


async def test_messages_held_back_between_keep_to_the_usual_way(tokenizer: Any):
    class Held(Wire):
        @property  # type: ignore[override]
        def bodies(self) -> int:
            return self.count - 1

        @bodies.setter
        def bodies(self, value: int) -> None:
            self.count = value

    async with front(tokenizer, *engines(1)) as f:
        assert (await f.ask(Held())).short == 0


async def test_streams_that_end_by_their_text_keep_to_the_usual_way(tokenizer: Any):
    async with front(tokenizer, *engines(1)) as f:
        wire = await f.ask(Wire(), stop=["never said"])
        assert wire.short == 0 and wire.told()[0] == (await f.ask(Wire())).told()[0]
        f.shortcuts = False
        assert (await f.ask(Wire())).short == 0


async def test_a_fault_ends_its_own_stream(tokenizer: Any, caplog: pytest.LogCaptureFixture):
    class Broken(Wire):
        def write(self, data: bytes) -> None:
            raise RuntimeError("no")

    async with front(tokenizer, *engines(1)) as f:
        wire = await f.ask(Broken())
        assert "the gateway failed: RuntimeError" in "".join(wire.events)
        assert f.gateway.core.active == 0
        assert (await f.ask(Wire())).short > 0


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[int]:
    """The port of a uvicorn with ``app``."""
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="critical", http="httptools")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(30):
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
        server.should_exit = True
        await task


async def test_an_outlet_writes_as_uvicorn_does():
    seen = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        outlet = seen["outlet"] = outlet_under(send)
        assert outlet is not None and not outlet.open
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        assert outlet.open
        outlet.write(b"two ")
        await send({"type": "http.response.body", "body": b"three", "more_body": False})
        assert not outlet.open
        outlet.write(b"too late")

    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.partition(b"\r\n\r\n")[2] == b"4\r\none \r\n4\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n"


async def test_an_outlet_knows_that_its_client_has_left_where_uvicorn_does_not_say_so():
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        outlet = outlet_under(send)
        assert outlet is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        cycle: Any = outlet._cycle
        try:
            while True:
                outlet.write(b"more")
                await asyncio.sleep(0.01)
        except ConnectionAbortedError:
            seen["told"] = cycle.disconnected

    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2)  # the second one waits for the first
        await reader.readuntil(b"more")
        writer.transport.abort()
        await until(lambda: "told" in seen)
    assert seen["told"] is False


async def test_what_is_not_uvicorns_own_has_no_outlet():
    async def send(message: Any) -> None:
        raise AssertionError(message)

    assert outlet_under(send) is None


def test_models_that_left_are_collected_and_the_others_not_looked_at():
    class Node:
        pass

    node = Node()
    node.own = node  # type: ignore[attr-defined]
    gone = weakref.ref(node)
    try:
        heap.settle()
        del node
        gc.collect()
        assert gone() is not None and gc.get_freeze_count() > 0
        heap.settle()
        assert gone() is None
    finally:
        gc.unfreeze()
