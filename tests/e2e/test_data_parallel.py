"""Data-parallel engines through `npufleet serve`: one engine to its users, several ranks behind it.

The model is a tiny mixture of experts with random weights in float32; its tokens are compared with transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from tests.parity.checkpoints import VOCAB
from tests.parity.reference import greedy, load, prompts

from .ask import ask
from .fleet import CORE, ENGINE, WORKER, Fleet, eventually, gone, kill
from .models import checkpoint, flags

STEPS = 24
Answers = list[tuple[int, ...]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("qwen3-moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Answers:
    reference = load(model)
    return [greedy(reference, prompt, STEPS).tokens for prompt in prompts(VOCAB)]


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    started: list[Fleet] = []

    def start(**settings: object) -> Fleet:
        # The default policy may find it quicker to compute a short prompt anew on the rank that answered faster.
        arguments = (*flags(**settings), "--set=router.policy=precise-prefix")
        fleet = Fleet(log=tmp_path / "log", target=str(model), engines=1, arguments=arguments)
        started.append(fleet)
        fleet.start()
        return fleet

    yield start
    for fleet in started:
        fleet.kill()


def answers(fleet: Fleet) -> Answers:
    """The standard prompts, all at once."""
    with ThreadPoolExecutor(len(prompts(VOCAB))) as pool:
        return [tuple(told.output_ids) for told in pool.map(partial(ask, fleet, steps=STEPS), prompts(VOCAB))]


def held(fleet: Fleet) -> set[int]:
    """The ranks whose caches hold blocks, by the first words of the engine's KV events."""
    request = common_pb2.SubscribeKvEventsRequest()
    with grpc.insecure_channel(fleet.router) as channel:
        batches = pb_grpc.VllmEngineStub(channel).SubscribeKvEvents(request, timeout=60)
        first = [next(batches) for _ in range(2)]
    return {batch.dp_rank for batch in first if any(event.HasField("stored") for event in batch.events)}


def loads(fleet: Fleet) -> list[int]:
    """The ranks that report what they do."""
    with grpc.insecure_channel(fleet.router) as channel:
        answer = pb_grpc.VllmEngineStub(channel).GetLoads(pb.GetLoadsRequest(), timeout=60)
    return sorted(load.dp_rank for load in answer.loads)


def family(fleet: Fleet) -> list[psutil.Process]:
    return [*fleet.processes(ENGINE), *fleet.processes(CORE), *fleet.processes(WORKER)]


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        ({"data_parallel_size": 2}, 2),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}, 4),
    ],
    ids=["dp2", "dp2-tp2-ep"],
)
def test_ranks_answer_as_one_and_come_back(
    settings: dict[str, object], workers: int, serve: Callable[..., Fleet], expected: Answers
) -> None:
    fleet = serve(**settings)
    assert answers(fleet) == expected
    assert loads(fleet) == [0, 1]
    long = [[(17 * number + at) % VOCAB for at in range(300)] for number in range(6)]
    assert [ask(fleet, prompt, STEPS).cached_tokens for prompt in long] == [0] * 6
    assert held(fleet) == {0, 1}, "requests one after another go to both ranks, and both tell what they hold"
    assert [ask(fleet, prompt, STEPS).cached_tokens for prompt in long] == [256] * 6, (
        "each goes where it was before"
    )
    (engine,) = fleet.status()["engines"]
    assert (engine["npus"], engine["ranks"]) == (workers, 2)
    before = fleet.processes(WORKER)
    assert len(before) == workers

    kill(before[-1])
    eventually("no worker of the broken engine is left", 120.0, lambda: all(map(gone, before)))
    eventually(
        "another engine has its place",
        240.0,
        lambda: [e["engine_id"] for e in fleet.status()["engines"]] not in ([], [engine["engine_id"]]),
    )
    fleet.whole()
    assert answers(fleet) == expected
    assert fleet.status()["npus"]["reserved"] == workers

    everything = fleet.processes()
    assert fleet.stop() == 0, fleet.said()
    assert "had to kill" not in fleet.said()
    assert [process.pid for process in everything if not gone(process)] == []
