"""Whether an answer whose stream broke was whole already.

An engine sends the last tokens and the message that says why they are the last as two messages; between them a stream
may break. An engine that went on behind an end token would make up text, so whoever goes on asks here first, by
the rules of vLLM's scheduler (``vllm/v1/core/sched/utils.py``, ``check_stop``) and in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from smg_grpc_proto import vllm_engine_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What ends an answer beside its request."""

    eos: tuple[int, ...] = ()  # end tokens of the model, the tokenizer's own first
    max_model_len: int = 0  # tokens of prompt and answer; 0: not known


class Finish(NamedTuple):
    """How an answer ended: vLLM's finish reason, and the token that is told as the reason where one is."""

    reason: str
    token: int | None = None


def finish_of(request: pb.GenerateRequest, tokens: Sequence[int], limits: Limits) -> Finish | None:
    """How the answer ``tokens`` to ``request`` ended; None where more of it was to come."""
    if not tokens:
        return None
    params, last = request.sampling_params, tokens[-1]
    eos = () if params.ignore_eos else limits.eos
    if eos and last == eos[0]:
        return Finish("stop")
    if last in params.stop_token_ids or last in eos:
        return Finish("stop", last)
    # More than the limit is an engine's that has another one: its answer was not full.
    full = limits.max_model_len and len(request.tokenized.input_ids) + len(tokens) == limits.max_model_len
    if full or (params.HasField("max_tokens") and len(tokens) >= params.max_tokens):
        return Finish("length")
    return None
