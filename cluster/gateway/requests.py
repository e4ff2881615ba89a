"""From vLLM's EngineCoreRequest to a VllmEngine GenerateRequest and its extension fields.

Token ids are always sent, and one choice per call (the frontend fans out n itself). Stop *strings* stay in
the gateway, where the text is made; a match cancels the call. What neither the message nor the extension
carries is refused with vLLM's ``VLLMValidationError`` (HTTP 400): nothing is dropped in silence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
from smg_grpc_proto import vllm_engine_pb2 as pb
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from ..proto.extension import EXTENSION_KEY, ExtensionError, encode
from ..proto.features import EngineFeatures
from .schema import endless_reference

STOCK_MAX_LOGPROBS = 20  # vLLM's default; a stock engine does not tell its own

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One request, ready to be sent to any engine that can take it."""

    message: pb.GenerateRequest
    fields: dict[str, Any]  # extension fields that must not be lost
    trace: Metadata
    wants_ranks: bool  # log probabilities are asked for

    @property
    def needs_features(self) -> bool:
        """True where the engine's features decide how, or whether, it is sent."""
        return self.wants_ranks or bool(self.fields)

    def to_engine(self, features: EngineFeatures) -> tuple[pb.GenerateRequest, Metadata, bool]:
        """The message and metadata for an engine with ``features``, and whether ranks will come back.

        Raises ``VLLMValidationError`` when the engine does not understand a field of this request.
        """
        if lacking := features.lacking(self.fields):
            raise VLLMValidationError(
                f"{', '.join(lacking)} cannot be used: the engine does not support it over gRPC",
                parameter=lacking[0],
            )
        message, fields, ranked = self.message, self.fields, False
        if self.wants_ranks:
            ranked = not features.lacking(("logprob_ranks",))
            if ranked:
                fields = {**fields, "logprob_ranks": True}
            else:
                message = _with_spare_alternative(message)
        try:
            extension = encode(fields)
        except ExtensionError as error:
            raise VLLMValidationError(str(error), parameter=error.field) from error
        metadata = self.trace if extension is None else (*self.trace, (EXTENSION_KEY, extension))
        return message, metadata, ranked


def _with_spare_alternative(message: pb.GenerateRequest) -> pb.GenerateRequest:
    """A stock engine cuts the list of alternatives after putting the chosen token in front: ask for one
    more."""
    copy = pb.GenerateRequest()
    copy.CopyFrom(message)
    params = copy.sampling_params
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name) and 0 < getattr(params, name) < STOCK_MAX_LOGPROBS:
            setattr(params, name, getattr(params, name) + 1)
    return copy


def from_core_request(request: EngineCoreRequest, *, watermarks: bool = False) -> Outgoing:
    """Translate ``request``; ``watermarks``: the model deployment marks its text unless a request opts out.

    Raises ``VLLMValidationError`` for what cannot be carried.
    """
    params = request.sampling_params
    if params is None:
        raise VLLMValidationError("embedding and pooling requests are not served by this gateway")
    _refuse_uncarried(request, params)
    stream = params.output_kind is not RequestOutputKind.FINAL_ONLY or bool(params.stop)
    message = pb.GenerateRequest(
        request_id=request.request_id,
        tokenized=pb.TokenizedInput(input_ids=request.prompt_token_ids),
        sampling_params=_sampling(params),
        stream=stream,
    )
    if request.data_parallel_rank is not None:
        message.data_parallel_rank = request.data_parallel_rank
    fields = _extension_fields(request, params)
    if watermarks and not params.watermarking:
        fields["watermarking"] = False
    extra = dict(params.extra_args or {})
    if (transfer := extra.pop("kv_transfer_params", None)) is not None:
        message.kv_transfer_params_json = json.dumps(transfer)
    if extra:
        fields["extra_args"] = extra
    return Outgoing(
        message=message,
        fields=fields,
        trace=tuple((key.lower(), value) for key, value in (request.trace_headers or {}).items()),
        wants_ranks=params.num_logprobs is not None or params.prompt_logprobs is not None,
    )


def _refuse_uncarried(request: EngineCoreRequest, params: SamplingParams) -> None:
    uncarried = {
        "multi-modal inputs": request.mm_features,
        "prompt_embeds": request.prompt_embeds is not None,
        "streamed input": request.resumable,
        "kv_hints": request.kv_hints,
        "prompt_logprob_token_ids": params.prompt_logprob_token_ids is not None,
        "routed_experts_prompt_start": params.routed_experts_prompt_start,
    }
    for name, given in uncarried.items():
        if given:
            raise VLLMValidationError(f"{name} cannot be sent to an engine over gRPC", parameter=name)
    if not request.prompt_token_ids:
        raise VLLMValidationError("the prompt is empty", parameter="prompt")
    wanted = params.structured_outputs
    if wanted is not None and wanted.json is not None and (at := endless_reference(wanted.json)):
        raise VLLMValidationError(
            f"no text can satisfy the JSON schema: the $ref at {at} leads back to itself and says nothing else",
            parameter="response_format",
        )


def _sampling(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=min(max(params.top_k, 0), 2**31 - 1),  # more than any vocabulary has: no limit, as it was meant
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        ignore_eos=params.ignore_eos,
        n=1,
        logit_bias=params.logit_bias,
    )
    if params.max_tokens is not None:
        message.max_tokens = params.max_tokens
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    if params.prompt_logprobs is not None:
        message.prompt_logprobs = params.prompt_logprobs
    if params.seed is not None and _fits_int32(params.seed):
        message.seed = params.seed
    if params.structured_outputs is not None:
        _constrain(message, params.structured_outputs)
    return message


def _fits_int32(value: int) -> bool:
    return -(2**31) <= value < 2**31


def _constrain(message: pb.SamplingParams, wanted: StructuredOutputsParams) -> None:
    if wanted.json is not None:
        message.json_schema = wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json)
    elif wanted.regex is not None:
        message.regex = wanted.regex
    elif wanted.choice is not None:
        message.choice.choices.extend(wanted.choice)
    elif wanted.grammar is not None:
        message.grammar = wanted.grammar
    elif wanted.structural_tag is not None:
        message.structural_tag = wanted.structural_tag
    elif wanted.json_object is not None:
        message.json_object = wanted.json_object


def _extension_fields(request: EngineCoreRequest, params: SamplingParams) -> dict[str, Any]:
    """Everything that differs from its default and that the message has no place for."""
    fields: dict[str, Any] = {}
    if request.priority:
        fields["priority"] = request.priority
    for name in ("cache_salt", "session_id", "reasoning_ended", "reasoning_parser_kwargs"):
        if (value := getattr(request, name)) is not None:
            fields[name] = value
    if (lora := request.lora_request) is not None:
        adapter = {"name": lora.lora_name, "id": lora.lora_int_id, "path": lora.lora_path}
        if lora.base_model_name:
            adapter["base_model"] = lora.base_model_name
        if lora.load_inplace:
            adapter["load_inplace"] = True
        fields["lora"] = adapter
    if params.seed is not None and not _fits_int32(params.seed):
        fields["seed"] = params.seed
    for name in (
        "bad_words", "allowed_token_ids", "logprob_token_ids", "trace_decode_token_ids",
        "thinking_token_budget", "stream_interval",
    ):  # fmt: skip
        if value := getattr(params, name):
            fields[name] = value
    if bool(params.skip_reading_prefix_cache) != (params.prompt_logprobs is not None):
        fields["skip_reading_prefix_cache"] = bool(params.skip_reading_prefix_cache)
    if params.repetition_detection is not None:
        detect = params.repetition_detection
        names = ("max_pattern_size", "min_pattern_size", "min_count")
        fields["repetition_detection"] = {name: getattr(detect, name) for name in names}
    if extras := _constraint_extras(params.structured_outputs):
        fields["structured_outputs"] = extras
    return fields


def _constraint_extras(wanted: StructuredOutputsParams | None) -> dict[str, Any]:
    if wanted is None:
        return {}
    extras: dict[str, Any] = {}
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if value := getattr(wanted, name):
            extras[name] = value
    return extras


_CARRIED_NAMES = """
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
    prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone
    output_text_buffer_length structured_outputs logit_bias allowed_token_ids extra_args bad_words
    skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start
    trace_decode_token_ids watermarking
"""
"""Public members of SamplingParams that this module knows: sent, kept in the gateway, or refused."""


def unknown_sampling_fields() -> set[str]:
    """Members of vLLM's SamplingParams that this module does not know: none with the pinned release."""
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    return {name for name in names if not name.startswith("_")}.difference(_CARRIED_NAMES.split())
