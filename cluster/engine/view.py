"""A thin view around an AsyncLLM that adds a call's extension fields to its generation request.

The stock servicer builds ``SamplingParams`` from the protobuf message and calls ``engine.generate``. It is
given this view in the engine's place: :data:`EXTENSION` holds the fields of the call in whose context it
runs, and :meth:`EngineView.generate` merges them before it hands over to the real engine. All else passes
through.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams

from ..proto.extension import SAMPLING_FIELDS

EXTENSION: ContextVar[Mapping[str, Any]] = ContextVar("npufleet_extension", default=MappingProxyType({}))
"""Extension fields of the RPC that runs in this context (``proto.extension``)."""

GENERATE_ARGUMENTS = ("priority", "session_id", "reasoning_ended", "reasoning_parser_kwargs")
"""Extension fields that are keyword arguments of ``AsyncLLM.generate`` under the same name."""


def merge_sampling(params: SamplingParams, fields: Mapping[str, Any]) -> SamplingParams:
    """``params`` with the sampling fields of an extension, checked again as vLLM checks new parameters.

    Changes and returns ``params``, which belongs to one request. Raises ``ValueError`` (or vLLM's
    ``VLLMValidationError``) for values that vLLM refuses.
    """
    changed = False
    for name in SAMPLING_FIELDS:
        if name not in fields:
            continue
        value = fields[name]
        changed = True
        if name == "structured_outputs":
            _merge_structured_outputs(params, value)
        elif name == "repetition_detection":
            params.repetition_detection = RepetitionDetectionParams(**value)
        elif name == "extra_args":
            params.extra_args = {**value, **(params.extra_args or {})}
        else:
            setattr(params, name, value)
    if changed:
        params.__post_init__()
    return params


def _merge_structured_outputs(params: SamplingParams, extras: Mapping[str, Any]) -> None:
    if params.structured_outputs is None:
        raise ValueError(
            f"{', '.join(sorted(extras))} given for structured outputs, but the request has no constraint"
        )
    for name, value in extras.items():
        setattr(params.structured_outputs, name, value)


def salt_prompt(prompt: Any, salt: str) -> Any:
    """``prompt`` (text or a prompt dictionary) with a cache salt; a salt that it already has stays part of
    it."""
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": salt}
    own = prompt.get("cache_salt")
    prompt["cache_salt"] = f"{own}:{salt}" if own else salt
    return prompt


def lora_request(fields: Mapping[str, Any]) -> LoRARequest:
    """The adapter named by the extension field ``lora``. Raises ``ValueError`` when name, id or path is
    missing."""
    missing = [key for key in ("name", "id", "path") if not fields.get(key)]
    if missing:
        raise ValueError(f"lora needs name, id (1 or more) and path; missing or empty: {', '.join(missing)}")
    return LoRARequest(
        lora_name=fields["name"],
        lora_int_id=fields["id"],
        lora_path=fields["path"],
        base_model_name=fields.get("base_model"),
        load_inplace=fields.get("load_inplace", False),
    )


class EngineView:
    """An AsyncLLM as the servicer sees it: ``generate`` reads :data:`EXTENSION`, everything else is the
    engine's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **arguments: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As ``AsyncLLM.generate``, with the extension fields of this context. Raises ``ValueError`` at
        once."""
        fields = EXTENSION.get()
        if fields:
            sampling_params = merge_sampling(sampling_params, fields)
            if salt := fields.get("cache_salt"):
                prompt = salt_prompt(prompt, salt)
            if adapter := fields.get("lora"):
                arguments["lora_request"] = lora_request(adapter)
            arguments.update({name: fields[name] for name in GENERATE_ARGUMENTS if name in fields})
        return self._engine.generate(
            prompt=prompt, sampling_params=sampling_params, request_id=request_id, **arguments
        )
