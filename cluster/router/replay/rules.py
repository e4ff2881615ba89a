"""Which answers another engine can go on with, and what it is sent.

The engine gets the prompt with the tokens already sent at its end, so whatever an engine derives from the tokens before
the next one carries over: attention, logit bias, allowed tokens, a repetition penalty (it counts prompt and answer
alike). What it keeps of the *answer* alone begins anew, and a request that needs that is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

MODES = ("off", "greedy", "all")
DEFAULT_RESUME = "greedy"
_GREEDY_BELOW = 1e-5  # the temperature below which vLLM takes the most likely token

# Extension fields (proto/extension.py) that mean the same for the rest of an answer as for all of it.
_CARRIED = frozenset(
    {
        "priority", "cache_salt", "session_id", "lora", "allowed_token_ids", "logprob_token_ids",
        "skip_reading_prefix_cache", "stream_interval", "watermarking", "logprob_ranks",
        "reasoning_ended", "reasoning_parser_kwargs",  # they open a grammar, and none is allowed
    }
)  # fmt: skip


def why_not(request: pb.GenerateRequest, fields: Mapping[str, Any], mode: str) -> str | None:
    """Why nobody can go on with the streamed answer to ``request``, or None where another engine can.

    ``fields`` are those of its extension, ``mode`` is one of :data:`MODES`: ``all`` also lets drawn tokens go on, which
    are then drawn from the right distribution but not those that the lost engine would have drawn.
    """
    assert mode in MODES, mode
    if mode == "off":
        return "router.resume is off"
    params = request.sampling_params
    return _of_input(request) or _of_sampling(params, mode) or _of_fields(params, fields)


def continued(request: pb.GenerateRequest, tokens: Sequence[int]) -> pb.GenerateRequest:
    """``request`` for the engine that goes on after ``tokens`` of its answer; there must be something left of it."""
    made = pb.GenerateRequest()
    made.CopyFrom(request)
    made.tokenized.input_ids.extend(tokens)
    made.tokenized.ClearField("original_text")  # it is not the text of these tokens any more
    params = made.sampling_params
    if params.HasField("max_tokens"):
        assert params.max_tokens > len(tokens), "an answer that is whole has no rest"
        params.max_tokens -= len(tokens)
    params.min_tokens = max(0, params.min_tokens - len(tokens))
    return made


def _of_input(request: pb.GenerateRequest) -> str | None:
    if not request.stream:
        return "it is not streamed"
    if request.WhichOneof("input") != "tokenized":
        return "its prompt is text, whose tokens only the engine knows"
    if request.HasField("mm_inputs") or request.extra_mm_inputs or request.HasField("media_refs"):
        return "it has multi-modal inputs"
    if request.HasField("kv_transfer_params_json") or request.HasField("kv_transfer_params"):
        return "it has parameters of a KV transfer"
    return None


def _of_sampling(params: pb.SamplingParams, mode: str) -> str | None:
    if params.n > 1:
        return "it has several answers"
    if params.WhichOneof("constraint"):
        return "a grammar binds its answer, and its state is lost"
    if params.stop:
        return "its engine looks for stop strings in the text, and one across the seam would be missed"
    if params.presence_penalty or params.frequency_penalty:
        return "presence and frequency penalties count the tokens of the answer, which are now the prompt's"
    if params.HasField("prompt_logprobs"):
        return "it asks for log probabilities of the prompt"
    if params.HasField("truncate_prompt_tokens"):
        return "its prompt may be truncated"
    if _greedy(params):
        return None
    if mode == "greedy":
        return "its tokens are drawn, and router.resume is greedy"
    if params.HasField("seed") and params.seed != -1:  # vLLM: -1 is none
        return "a seed binds its draws"
    return None


def _of_fields(params: pb.SamplingParams, fields: Mapping[str, Any]) -> str | None:
    for name in fields:
        if name not in _CARRIED and not (name == "seed" and _greedy(params)):
            return f"{name} concerns the answer as a whole"
    return None


def _greedy(params: pb.SamplingParams) -> bool:
    return params.HasField("temperature") and params.temperature < _GREEDY_BELOW
