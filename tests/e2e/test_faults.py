"""kill -9, under load: what breaks says so, the rest goes on, everything comes back without help."""

from __future__ import annotations

import httpx
import openai
import psutil
import pytest

from .fleet import (
    CONTROLLER,
    CORE,
    ENGINE,
    MODEL,
    ROUTER,
    SERVE,
    WORKER,
    Fleet,
    eventually,
    gone,
    kill,
    sockets,
)
from .load import Load


def cores_of(fleet: Fleet) -> list[psutil.Process]:
    """The engine-core processes (each has its engine as parent)."""
    engines = {process.pid for process in fleet.processes(ENGINE)}
    return [process for process in fleet.processes(CORE) if process.ppid() in engines]


@pytest.mark.parametrize("victim", ["worker", "core", "engine"])
def test_an_engine_dies_under_load(fleet: Fleet, client: openai.OpenAI, victim: str) -> None:
    before = {engine["engine_id"] for engine in fleet.status()["engines"]}
    core = cores_of(fleet)[0]
    engine = psutil.Process(core.ppid())
    worker = next(p for p in fleet.processes(WORKER))
    files = sockets([engine, core])
    assert files, "an engine and its core meet at sockets"
    load = Load(client, 4)
    kill({"worker": worker, "core": core, "engine": engine}[victim])
    whole, broken = load.wait()
    assert len(whole) >= 2, "the other engine's streams go on"
    for stream in broken:
        assert "engine" in str(stream.error), "the error says what happened"
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3,", max_tokens=4)
    assert answer.choices[0].text, "the fleet answers meanwhile"
    if victim != "worker":
        eventually("nothing of the dead engine lives on", 60.0, lambda: gone(core) and gone(engine))
        assert [path for path in files if path.exists()] == []
    fleet.whole()
    after = {engine["engine_id"] for engine in fleet.status()["engines"]}
    assert len(after & before) == 1
    assert fleet.status()["npus"]["reserved"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["core", "engine"])
def test_no_greedy_stream_breaks_with_its_engine(fleet: Fleet, client: openai.OpenAI, victim: str) -> None:
    fleet.whole()
    core = cores_of(fleet)[0]
    load = Load(client, 6)  # temperature 0, and end tokens do not end them
    kill(core if victim == "core" else psutil.Process(core.ppid()))
    whole, broken = load.wait()
    assert not broken, [str(stream.error) for stream in broken]
    assert len(whole) == 6
    assert {stream.tokens for stream in whole} == {load.tokens}, "each answer is as long as it was to be"
    fleet.whole()


def test_the_router_dies(fleet: Fleet, client: openai.OpenAI) -> None:
    engines = {process.pid for process in fleet.processes(ENGINE)}
    kill(fleet.processes(ROUTER)[0])
    with pytest.raises((httpx.HTTPError, openai.APIError)):
        client.with_options(timeout=5).completions.create(model=MODEL, prompt="x", max_tokens=1)
    fleet.whole()
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3,", max_tokens=4)
    assert answer.choices[0].text
    assert {process.pid for process in fleet.processes(ENGINE)} == engines, "the engines never noticed"


def test_serves_own_controller_dies_and_the_engines_go_on(fleet: Fleet, client: openai.OpenAI) -> None:
    engines = {process.pid for process in fleet.processes(ENGINE)}
    first = fleet.processes(SERVE)[0]
    kill(first)
    eventually("there is another", 120.0, lambda: fleet.processes(SERVE))
    for _ in range(2):  # it asks each replica meanwhile how it is
        _, broken = Load(client, 4).wait()
        assert not broken, [str(stream.error) for stream in broken]
    assert fleet.ready() == 2
    assert {process.pid for process in fleet.processes(ENGINE)} == engines


def test_the_controller_dies_and_nobody_notices(fleet: Fleet, client: openai.OpenAI) -> None:
    epoch = fleet.status()["epoch"]
    load = Load(client, 4)
    kill(fleet.processes(CONTROLLER)[0])
    _, broken = load.wait()
    assert not broken, [str(stream.error) for stream in broken]

    def rebuilt() -> bool:
        try:
            status = fleet.status()
        except httpx.HTTPError:
            return False
        return status["epoch"] != epoch and status["models"][0]["ready"] == 2

    eventually("the controller is back and knows both engines", 120.0, rebuilt)
    assert client.completions.create(model=MODEL, prompt="1, 2, 3,", max_tokens=4).choices[0].text
