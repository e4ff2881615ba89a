"""The sizes of a model that decide its memory, read from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import checks
from .quantization import Quantization, read

DENSE = ("llama", "mistral", "qwen2", "qwen3")
MOE = ("mixtral", "qwen3_moe", "glm4_moe")
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1)."""

    q_rank: int | None
    """Elements of a compressed query; None where queries are not compressed."""
    kv_rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts."""

    count: int
    top_k: int
    intermediate: int
    shared: int
    """Intermediate size of the experts that every token takes; 0 if there are none."""
    biased: bool
    """Whether the choice has a learnt float32 bias."""
    gate_bytes: int | None
    """Bytes of an element of the gate; None: as the model."""
    spread: bool
    """Whether vLLM's model can spread tokens over tensor-parallel ranks; its shared experts are then whole on each."""
    layers: frozenset[int]
    """Which layers have them; the others have a plain feed-forward layer."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only model. Sizes in elements."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the output layer is the embedding."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: bool
    """Whether queries and keys are normed per head."""
    rotary_positions: int
    rotary: int
    """Rotated elements of a head."""
    max_length: int
    dtype: str
    latent: Latent | None = None
    experts: Experts | None = None
    quantization: Quantization | None = None
    """None: all weights are kept in ``dtype``."""


def from_config(
    config: Mapping[str, Any],
    where: str = "config.json",
    description: Mapping[str, Any] | None = None,
) -> ModelShape:
    """Read a model's configuration.

    Args:
        config: ``config.json``.
        where: what errors call it.
        description: what ModelSlim wrote beside it, if there is such a file.

    Raises:
        ValueError: for a kind of model or a format of weights whose sizes are not known here, or for a number
            that is missing; it names what was found and what is allowed.
    """
    kind = config.get("model_type")
    known = (*DENSE, *MOE, *LATENT)
    if kind not in known:
        raise ValueError(f"{where}: model_type is {kind!r}; the memory of these is known: {', '.join(known)}")
    quantization = read(config, description, where)
    number = _Numbers(config, where)
    heads, hidden = number("num_attention_heads", low=1), number("hidden_size", low=1)
    head = number.or_else("head_dim", hidden // heads)
    latent = _latent(number) if kind in LATENT else None
    rotary = latent.rope if latent else int(head * _rotary_part(config))
    positions = number("max_position_embeddings", low=1)
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return ModelShape(
        model_type=str(kind),
        layers=number("num_hidden_layers", low=1),
        hidden=hidden,
        heads=heads,
        kv_heads=number.or_else("num_key_value_heads", heads),
        head=latent.nope + latent.rope if latent else head,
        intermediate=number("intermediate_size"),
        vocabulary=number("vocab_size", low=1),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
        out_bias=kind == "llama" and bool(config.get("attention_bias", False)),
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
        head_norms=kind in ("qwen3", "qwen3_moe") or (kind == "glm4_moe" and bool(config.get("use_qk_norm"))),
        rotary_positions=_positions(config, positions),
        rotary=rotary,
        max_length=positions,
        dtype=checks.choice(dtype, f"{where}: dtype", tuple(DTYPES)),
        latent=latent,
        experts=_experts(str(kind), config, number) if kind not in DENSE else None,
        quantization=quantization,
    )


class _Numbers:
    """The whole numbers of a configuration, each of which must be there."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def __call__(self, name: str, default: int | None = None, low: int = 0) -> int:
        value = self._config.get(name, default)
        return checks.integer(value, f"{self._where}: {name}", low, 1 << 40)

    def or_else(self, name: str, default: int) -> int:
        """The number, or ``default`` where there is none or it is 0."""
        return self(name) if self._config.get(name) is not None and self(name) else default


def _rotary_part(config: Mapping[str, Any]) -> float:
    nested = config.get("rope_parameters")
    default = 0.5 if config.get("model_type") == "glm4_moe" else 1.0
    given = config.get("partial_rotary_factor")
    if given is None and isinstance(nested, Mapping):
        given = nested.get("partial_rotary_factor")
    return checks.number(default if given is None else given, "partial_rotary_factor", 0.0, 1.0)


def _positions(config: Mapping[str, Any], positions: int) -> int:
    """Rows of vLLM's table of cosines and sines; YaRN's is as long as the original context times the factor."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type")) != "yarn":
        return positions
    original = scaling.get("original_max_position_embeddings") or positions
    original = checks.integer(original, "original_max_position_embeddings", 1, 1 << 40)
    return int(original * checks.number(scaling.get("factor"), "factor of YaRN", 0.0, 1e9))


def _latent(number: _Numbers) -> Latent:
    return Latent(
        q_rank=number("q_lora_rank") if number._config.get("q_lora_rank") else None,
        kv_rank=number("kv_lora_rank"),
        rope=number("qk_rope_head_dim"),
        nope=number("qk_nope_head_dim"),
        value=number("v_head_dim"),
    )


def _experts(kind: str, config: Mapping[str, Any], number: _Numbers) -> Experts | None:
    layers = range(number("num_hidden_layers"))
    shared = 0
    biased = False
    if kind == "mixtral":
        count, middle, having = number("num_local_experts"), number("intermediate_size"), frozenset(layers)
    elif kind == "qwen3_moe":
        name = "num_experts" if "num_experts" in config else "num_local_experts"  # as transformers 5 saves it
        count, middle = number(name), number("moe_intermediate_size")
        step, plain = number("decoder_sparse_step", 1, low=1), config.get("mlp_only_layers") or ()
        if not isinstance(plain, list | tuple):
            raise ValueError(f"mlp_only_layers: expected a list, got {checks.shown(plain)}")
        having = frozenset(i for i in layers if i not in plain and (i + 1) % step == 0)
    else:
        if not config.get("n_routed_experts"):
            return None
        count, middle = number("n_routed_experts"), number("moe_intermediate_size")
        shared = number.or_else("n_shared_experts", 0) * middle
        every = number("moe_layer_freq", 1, low=1)
        having = frozenset(i for i in layers if i >= number("first_k_dense_replace", 0) and i % every == 0)
        biased = kind in ("glm4_moe", "deepseek_v3", "kimi_k2")
        biased = config.get("topk_method", "noaux_tc") == "noaux_tc" if biased else False
    if not having:
        return None
    return Experts(
        count=count,
        top_k=number("num_experts_per_tok"),
        intermediate=middle,
        shared=shared,
        biased=biased,
        gate_bytes=4 if kind == "glm4_moe" else None,
        spread=kind in (*LATENT, "qwen3_moe"),
        layers=having,
    )
