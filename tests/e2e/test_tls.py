"""A fleet under mutual TLS through `npufleet serve`: clients and router, router and engines show certificates."""

from __future__ import annotations

from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from tests.cluster.certificates import Authority
from tests.parity.checkpoints import VOCAB
from tests.parity.reference import greedy, load, prompts

from .fleet import Fleet
from .models import SETTINGS, checkpoint

STEPS = 12

pytestmark = pytest.mark.slow


def ask(channel: grpc.Channel, prompt: list[int]) -> tuple[int, ...]:
    """The tokens of one greedy answer."""
    request = pb.GenerateRequest(request_id="", stream=True)
    request.tokenized.input_ids.extend(prompt)
    request.sampling_params.temperature = 0.0
    request.sampling_params.max_tokens = STEPS
    request.sampling_params.ignore_eos = True
    with channel:
        call = pb_grpc.VllmEngineStub(channel).Generate(request, timeout=240)
        return tuple(token for answer in call for token in answer.chunk.token_ids)


def test_a_fleet_serves_under_mutual_tls_and_refuses_clients_without_certificate(tmp_path: Path) -> None:
    model = checkpoint("llama", tmp_path / "models")
    authority = Authority(tmp_path)
    ours, client = authority.sign("npufleet"), authority.sign("client")
    inside = {"ca": str(authority.ca), "certificate": str(ours.certificate), "key": str(ours.key)}
    front = {"certificate": str(ours.certificate), "key": str(ours.key), "client_ca": str(authority.ca)}
    file = tmp_path / "fleet.yaml"
    config = {
        "name": "secured",
        "device": "virtual",
        "models": [{"name": "chat", "source": str(model), "engines": 1, "engine": SETTINGS}],
        "router": {"engine_tls": inside, "tls": front},
    }
    file.write_text(yaml.safe_dump(config))
    fleet = Fleet(log=tmp_path / "log", target=str(file), engines=1)
    shown = (client.key.read_bytes(), client.certificate.read_bytes())
    with_one = grpc.ssl_channel_credentials(authority.ca.read_bytes(), *shown)
    without = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    try:
        fleet.start()
        reference = load(model)
        for prompt in prompts(VOCAB):
            expected = greedy(reference, prompt, STEPS).tokens
            assert ask(grpc.secure_channel(fleet.router, with_one), prompt) == expected
        prompt = prompts(VOCAB)[0]
        body = {"model": "chat", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=240)
        assert answer.status_code == 200, answer.text

        (engine,) = fleet.status()["engines"]
        for address in (fleet.router, engine["address"]):
            for channel in (grpc.secure_channel(address, without), grpc.insecure_channel(address)):
                with pytest.raises(grpc.RpcError) as refused:
                    ask(channel, prompt)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, address
        with pytest.raises(
            grpc.RpcError
        ) as unsigned:  # a certificate opens the port, the router's word the engine
            name = (("grpc.ssl_target_name_override", "npufleet"),)
            ask(grpc.secure_channel(engine["address"], with_one, name), prompt)
        assert unsigned.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert fleet.stop() == 0, fleet.said()
    finally:
        fleet.kill()
