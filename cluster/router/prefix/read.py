"""The prompt of a request, as prefix caches see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from npufleet.cluster.router.prefix.prompt import Media, TokenPrompt, pack


def from_message(request: Any, fields: Mapping[str, Any]) -> TokenPrompt | None:
    """The prompt of a ``VllmEngine.GenerateRequest`` with its extension ``fields``; None for a text prompt,
    whose tokens only its engine knows.
    """
    if request.WhichOneof("input") != "tokenized":
        return None
    batches = (*([request.mm_inputs] if request.HasField("mm_inputs") else ()), *request.extra_mm_inputs)
    media = [
        Media(identifier=identifier, offset=place.offset, length=place.length)
        for batch in batches
        for identifier, place in zip(batch.mm_hashes, batch.mm_placeholders, strict=False)
    ]
    adapter = fields.get("lora") or {}
    return make(
        request.tokenized.input_ids,
        media,
        lora=adapter.get("name") or "",
        salt=fields.get("cache_salt") or "",
    )


def make(token_ids: Iterable[int], media: Sequence[Media], *, lora: str, salt: str) -> TokenPrompt | None:
    """A prompt of token ids; None for ids that are not ids: the engine will say so."""
    try:
        tokens = pack(token_ids)
    except (OverflowError, TypeError):
        return None
    ordered = tuple(sorted(media, key=lambda item: item.offset))
    return TokenPrompt(tokens=tokens, media=ordered, lora=lora, salt=salt)
