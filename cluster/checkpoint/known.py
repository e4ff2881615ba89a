"""The tensors of the model families whose sizes are known: what each is called, and its shape.

The names are those of Hugging Face's published checkpoints, the shapes follow from ``config.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..plan.model import Experts, Latent, ModelShape
from .files import Shape, Stored

_PACKED_BITS = 32


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One weight that the model has: its name without the leaf, and its shape as a plain matrix or vector."""

    module: str
    shape: Shape
    linear: bool = True  # may be quantized
    leaf: str = "weight"


def prefix(tensors: Mapping[str, Stored]) -> str | None:
    """Return what stands before ``layers.0`` in the names (``model.``), None if there are no such names."""
    found = {name.partition("layers.0.")[0] for name in tensors if "layers.0." in name}
    return found.pop() if len(found) == 1 else None


def expected(shape: ModelShape, before: str, *, head: bool) -> Iterator[Expected]:
    """Return every weight that the model needs, in the order of its layers.

    Args:
        shape: the model.
        before: see :func:`prefix`.
        head: whether it has an output layer of its own.
    """
    table = (shape.vocabulary, shape.hidden)
    yield Expected(module=f"{before}embed_tokens", shape=table, linear=False)
    for number in range(shape.layers):
        for part in _layer(shape, number):
            yield Expected(
                module=f"{before}layers.{number}.{part.module}",
                shape=part.shape,
                linear=part.linear,
                leaf=part.leaf,
            )
    yield Expected(module=f"{before}norm", shape=(shape.hidden,), linear=False)
    if head:
        yield Expected(module="lm_head", shape=table, linear=False)


def _layer(shape: ModelShape, number: int) -> Iterator[Expected]:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Expected(module=norm, shape=(shape.hidden,), linear=False)
    if shape.latent:
        yield from _latent(shape, shape.latent)
    else:
        yield from _attention(shape)
    if shape.experts and number in shape.experts.layers:
        yield from _experts(shape, shape.experts)
    else:
        yield from _feed_forward("mlp", shape.hidden, shape.intermediate, biased=shape.mlp_bias)


def _attention(shape: ModelShape) -> Iterator[Expected]:
    query, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    for name, rows in (("q_proj", query), ("k_proj", keys), ("v_proj", keys)):
        yield from _linear(f"self_attn.{name}", rows, shape.hidden, biased=shape.qkv_bias)
    yield from _linear("self_attn.o_proj", shape.hidden, query, biased=shape.out_bias)
    if shape.head_norms:
        for name in ("q_norm", "k_norm"):
            yield Expected(module=f"self_attn.{name}", shape=(shape.head,), linear=False)


def _latent(shape: ModelShape, latent: Latent) -> Iterator[Expected]:
    """DeepSeek-V2, equations 9 to 19: projections down to the latents, their norms, and up to the heads."""
    query = shape.heads * shape.head
    if latent.q_rank:
        yield Expected(module="self_attn.q_a_proj", shape=(latent.q_rank, shape.hidden))
        yield Expected(module="self_attn.q_a_layernorm", shape=(latent.q_rank,), linear=False)
        yield Expected(module="self_attn.q_b_proj", shape=(query, latent.q_rank))
    else:
        yield Expected(module="self_attn.q_proj", shape=(query, shape.hidden))
    down, up = latent.kv_rank + latent.rope, shape.heads * (latent.nope + latent.value)
    yield Expected(module="self_attn.kv_a_proj_with_mqa", shape=(down, shape.hidden))
    yield Expected(module="self_attn.kv_a_layernorm", shape=(latent.kv_rank,), linear=False)
    yield Expected(module="self_attn.kv_b_proj", shape=(up, latent.kv_rank))
    yield Expected(module="self_attn.o_proj", shape=(shape.hidden, shape.heads * latent.value))


def _feed_forward(
    module: str, hidden: int, middle: int, *, biased: bool = False, names: tuple[str, ...] = ()
) -> Iterator[Expected]:
    gate, up, down = names or ("gate_proj", "up_proj", "down_proj")
    for name in (gate, up):
        yield from _linear(f"{module}.{name}", middle, hidden, biased=biased)
    yield from _linear(f"{module}.{down}", hidden, middle, biased=biased)


def _experts(shape: ModelShape, experts: Experts) -> Iterator[Expected]:
    mixtral = shape.model_type == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    yield Expected(module=f"{block}.gate", shape=(experts.count, shape.hidden), linear=False)
    if experts.biased:
        leaf = "e_score_correction_bias"
        yield Expected(module=f"{block}.gate", shape=(experts.count,), linear=False, leaf=leaf)
    names = ("w1", "w3", "w2") if mixtral else ()
    for number in range(experts.count):
        yield from _feed_forward(f"{block}.experts.{number}", shape.hidden, experts.intermediate, names=names)
    if experts.shared:
        yield from _feed_forward(f"{block}.shared_experts", shape.hidden, experts.shared)


def _linear(module: str, rows: int, columns: int, *, biased: bool) -> Iterator[Expected]:
    yield Expected(module=module, shape=(rows, columns))
    if biased:
        yield Expected(module=module, shape=(rows,), linear=False, leaf="bias")


def stacked(expected: Expected, tensors: Mapping[str, Stored]) -> bool:
    """Whether the checkpoint holds all experts of a layer in one tensor, where the weight of one is looked for."""
    block, found, _ = expected.module.partition(".experts.")
    return bool(found) and any(f"{block}.experts.{name}" in tensors for name in ("gate_up_proj", "down_proj"))


def packed_shape(shape: Shape, bits: int) -> Shape:
    """Return the shape of a matrix whose rows are packed into 32-bit integers."""
    rows, columns = shape
    return rows, -(-columns * bits // _PACKED_BITS)
