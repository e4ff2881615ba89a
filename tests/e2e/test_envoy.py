"""A fleet behind Envoy through `npufleet serve`: real engines that take signed calls only, a real Envoy before them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from npufleet.cluster.router.envoy.process import find_envoy
from tests.parity.checkpoints import VOCAB
from tests.parity.reference import greedy, load, prompts

from .fleet import Fleet, eventually, gone, kill
from .models import checkpoint, flags

STEPS = 24
PROMPTS = prompts(VOCAB)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def fleet(model: Path, tmp_path: Path) -> Iterator[Fleet]:
    secret = tmp_path / "secret"
    secret.write_text("a secret of the fleet, thirty-two bytes or more\n")
    secret.chmod(0o600)
    made = Fleet(
        log=tmp_path / "log",
        target=str(model),
        engines=2,
        arguments=(
            *flags(),
            "--replicas=2",
            "--set=router.data_plane=envoy",
            f"--set=router.secret={secret}",
        ),
    )
    try:
        made.start()
        yield made
    finally:
        made.kill()


def request(prompt: list[int], *, stream: bool = True) -> pb.GenerateRequest:
    made = pb.GenerateRequest(request_id="", stream=stream)
    made.tokenized.input_ids.extend(prompt)
    made.sampling_params.temperature = 0.0
    made.sampling_params.max_tokens = STEPS
    made.sampling_params.ignore_eos = True
    return made


def ask(address: str, prompt: list[int]) -> tuple[tuple[int, ...], str]:
    """The tokens of a stream, and the engine that gave them."""
    with grpc.insecure_channel(address) as channel:
        call = pb_grpc.VllmEngineStub(channel).Generate(request(prompt), timeout=240)
        tokens = [token for answer in call for token in answer.chunk.token_ids]
        return tuple(tokens), dict(call.trailing_metadata())["x-npufleet-engine"]


def envoys(fleet: Fleet) -> list[psutil.Process]:
    program = Path(find_envoy()).name
    return [process for process in fleet.processes() if not gone(process) and process.name() == program]


def test_a_fleet_answers_behind_envoy(fleet: Fleet, model: Path) -> None:
    reference = load(model)
    expected = [greedy(reference, prompt, STEPS).tokens for prompt in PROMPTS]
    answers = [ask(fleet.router, prompt) for prompt in [*PROMPTS, *PROMPTS]]
    assert [tokens for tokens, _ in answers] == expected * 2
    known = {engine["engine_id"]: engine for engine in fleet.status()["engines"]}
    assert {engine for _, engine in answers} <= known.keys()

    with grpc.insecure_channel(fleet.router) as channel:  # the other calls go to the router's own front
        loads = pb_grpc.VllmEngineStub(channel).GetLoads(pb.GetLoadsRequest(), timeout=60)
    assert len(loads.loads) == 2
    address = next(iter(known.values()))["address"]
    with pytest.raises(grpc.RpcError) as refused:
        ask(address, PROMPTS[0])
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, (
        "engines take what the router signed alone"
    )

    body = {"model": model.name, "prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0}
    name = httpx.get(f"{fleet.url}/v1/models", timeout=30).json()["data"][0]["id"]
    answer = httpx.post(f"{fleet.url}/v1/completions", json={**body, "model": name}, timeout=240)
    assert answer.status_code == 200, answer.text

    (before,) = envoys(fleet)
    kill(before)
    eventually("Envoy is there again", 60.0, lambda: envoys(fleet))
    eventually("and answers", 60.0, lambda: answers_now(fleet, PROMPTS[0]) == expected[0])

    everything = fleet.processes()
    assert fleet.stop() == 0, fleet.said()
    assert [process.pid for process in everything if not gone(process)] == []


def answers_now(fleet: Fleet, prompt: list[int]) -> tuple[int, ...]:
    try:
        return ask(fleet.router, prompt)[0]
    except grpc.RpcError:
        return ()
