"""Keys of the prefix blocks of a prompt.

An engine caches whole blocks of a prompt, and a block only means something after the blocks before it. So a
block's key is a hash over its parent's key and its own content; two prompts share exactly the blocks whose
keys are equal. What else decides about reuse goes in too: the LoRA adapter and the cache salt begin the
chain, and an image or audio clip counts in each block that it touches, with its offset relative to the
block, as vLLM's own block hashes do (``vllm/v1/core/kv_cache_utils.py``, extra keys).

Keys are ours alone: engines hash with seeds of their own, and nobody outside a process needs these. They use
Python's own hash, which is keyed at random for each process (PEP 456), so a client cannot aim for a
collision; one that happens costs a misjudged pick, never a wrong answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Key = int
ROOT: Key = 0
_TOKEN_BYTES = 4


class Prompt(Protocol):
    """Something with prefix blocks."""

    @property
    def length(self) -> int:
        """Prompt tokens, those of an incomplete last block included."""
        ...

    def keys(self, block_size: int) -> Sequence[Key]:
        """The keys of its whole blocks of ``block_size`` tokens, first to last."""
        ...

    def anchor(self, tokens: int) -> bytes:
        """Its first ``tokens`` tokens and its namespace, the same in every process; empty for no tokens."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """One image, clip or other item of a prompt: its content's hash and the tokens it stands for."""

    identifier: str
    offset: int  # first token
    length: int  # tokens


def namespace(lora: str = "", salt: str = "") -> Key:
    """The key before the first block of prompts with this adapter and cache salt."""
    return hash((lora, salt)) if lora or salt else ROOT


def chain(parent: Key, tokens: bytes, media: Sequence[tuple[str, int]] = ()) -> Key:
    """The key of a block: ``tokens`` are its token ids as native uint32, ``media`` what lies in it."""
    return hash((parent, tokens, *media)) if media else hash((parent, tokens))


def pack(token_ids: Iterable[int]) -> bytes:
    """Token ids as native uint32."""
    return array("I", token_ids).tobytes()


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TokenPrompt:
    """A prompt of token ids. Keys are made once per block size."""

    tokens: bytes  # native uint32
    media: tuple[Media, ...] = ()  # in the order of their offsets
    lora: str = ""
    salt: str = ""
    _made: dict[int, tuple[Key, ...]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Prompt tokens."""
        return len(self.tokens) // _TOKEN_BYTES

    def keys(self, block_size: int) -> tuple[Key, ...]:
        """The keys of its whole blocks."""
        made = self._made.get(block_size)
        if made is None:
            made = self._made[block_size] = tuple(self._chain(block_size))
        return made

    def anchor(self, tokens: int) -> bytes:
        """Its first tokens and its namespace."""
        head = self.tokens[: tokens * _TOKEN_BYTES]
        return b"\0".join((self.lora.encode(), self.salt.encode(), head)) if head else b""

    def _chain(self, block_size: int) -> list[Key]:
        width, tokens = block_size * _TOKEN_BYTES, self.tokens
        parent, keys = namespace(self.lora, self.salt), []
        for start in range(0, len(tokens) - width + 1, width):
            media = self._within(start // _TOKEN_BYTES, block_size) if self.media else ()
            parent = chain(parent, tokens[start : start + width], media)
            keys.append(parent)
        return keys

    def _within(self, start: int, size: int) -> tuple[tuple[str, int], ...]:
        return tuple(
            (item.identifier, item.offset - start)
            for item in self.media
            if item.offset < start + size and item.offset + item.length > start
        )
