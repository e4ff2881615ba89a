"""One request to a fleet's router by token ids."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from .fleet import Fleet


def ask(fleet: Fleet, prompt: Sequence[int], steps: int) -> pb.GenerateComplete:
    """Return the greedy answer of ``steps`` tokens."""
    request = pb.GenerateRequest(request_id="", stream=False)
    request.tokenized.input_ids.extend(prompt)
    request.sampling_params.temperature = 0.0
    request.sampling_params.max_tokens = steps
    request.sampling_params.ignore_eos = True
    with grpc.insecure_channel(fleet.router) as channel:
        return list(pb_grpc.VllmEngineStub(channel).Generate(request, timeout=240))[-1].complete
