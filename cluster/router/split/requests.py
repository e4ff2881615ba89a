"""Requests of a pair: which may be split, and what the two engines are sent."""

from __future__ import annotations

import json
from collections.abc import Iterable

from npufleet.cluster.proto.extension import EXTENSION_KEY, encode, from_metadata
from npufleet.cluster.router.split.base import Params
from npufleet.cluster.router.wire import pb, varint

_PARAMS_TAG = b"\x42"  # field 8, length-delimited, in GenerateRequest


def may_split(request: pb.GenerateRequest) -> bool:
    """Whether a second engine could go on after the first one has computed the prompt.

    Not with one token of output (there is nothing to go on with), several answers (each would want the blocks, which
    are handed over once), log probabilities of the prompt (they come out of computing it), or parameters of the
    client's own for a transfer.
    """
    params = request.sampling_params
    own = request.HasField("kv_transfer_params_json") or request.HasField("kv_transfer_params")
    one_token = params.HasField("max_tokens") and params.max_tokens <= 1
    return not (one_token or params.n > 1 or params.HasField("prompt_logprobs") or own)


def worth_splitting(prompt_tokens: int, cached: int, least: int) -> bool:
    """Whether so much of the prompt would have to be computed beside the decoding of others that it shall be
    computed elsewhere: ``cached`` tokens of it are known to be where it would be decoded.
    """
    return prompt_tokens - cached >= least


def prefill_request(request: pb.GenerateRequest, params: Params | None) -> bytes:
    """``request`` for the engine that computes its prompt: one token, whichever it is, which nobody sees.

    Connectors hand over the blocks of requests that end because of their length, so nothing else may end it.
    """
    first = pb.GenerateRequest()
    first.CopyFrom(request)
    sampling = first.sampling_params
    sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos = 1, 0, True
    for name in ("stop", "stop_token_ids", "logprobs"):
        sampling.ClearField(name)
    if constraint := sampling.WhichOneof("constraint"):
        sampling.ClearField(constraint)
    first.stream = False
    if params is not None:
        first.kv_transfer_params_json = json.dumps(params)
    return first.SerializeToString()


def prefill_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> list[tuple[str, str | bytes]]:
    """The metadata that goes with :func:`prefill_request`: without what refines a constraint that it lacks."""
    kept: list[tuple[str, str | bytes]] = []
    for key, value in metadata:
        if key == EXTENSION_KEY:
            fields = from_metadata([(key, value)])
            fields.pop("structured_outputs", None)
            extension = encode(fields)
            if extension is None:
                continue
            value = extension
        kept.append((key, value))
    return kept


def with_params(raw: bytes, params: Params | None) -> bytes:
    """``raw``, a Generate request, with these parameters of a transfer; None: it stays as it is."""
    if params is None:
        return raw
    value = json.dumps(params).encode()
    return b"".join((raw, _PARAMS_TAG, varint(len(value)), value))
