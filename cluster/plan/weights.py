"""The weights of one rank, as vLLM splits them over NPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .model import DTYPES, Experts, Latent, ModelShape

VOCABULARY_ALIGNMENT = 64
"""vLLM pads the vocabulary to a multiple of this (``vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE``)."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How an engine's ranks share a model."""

    tensor: int = 1
    data: int = 1
    """Replicas that take their steps together; those of models with experts share the experts."""
    expert_parallel: bool = False
    """Whole experts on each rank, in place of a slice of every expert."""

    @property
    def ranks(self) -> int:
        """NPUs of the engine."""
        return self.tensor * self.data

    @property
    def expert_ranks(self) -> int:
        """Ranks that the experts are spread over; 1 without expert parallelism."""
        return self.ranks if self.expert_parallel else 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """Weights of one kind."""

    name: str
    elements: int
    bytes: int


def spreads_tokens(shape: ModelShape, layout: Layout) -> bool:
    """Whether vLLM spreads the tokens of a replica over its ranks around the experts
    (``ParallelConfig.use_sequence_parallel_moe``, and models that heed it).
    """
    together = layout.expert_parallel and layout.tensor > 1 and layout.data > 1
    return together and shape.experts is not None and shape.experts.spread


def check(shape: ModelShape, layout: Layout) -> None:
    """Refuse a layout in which vLLM or the plugin cannot split the model.

    Raises:
        ValueError: naming what does not divide.
    """
    tensor, experts = layout.tensor, shape.experts
    if shape.heads % tensor:
        raise ValueError(f"tensor_parallel_size {tensor} does not divide its {shape.heads} attention heads")
    if max(shape.kv_heads, tensor) % min(shape.kv_heads, tensor) and not shape.latent:
        raise ValueError(
            f"tensor_parallel_size {tensor} and its {shape.kv_heads} key heads: neither divides the other"
        )
    plain = shape.layers - (len(experts.layers) if experts else 0)
    if plain and shape.intermediate % tensor:
        raise ValueError(
            f"tensor_parallel_size {tensor} does not divide its intermediate size {shape.intermediate}"
        )
    if layout.expert_parallel and not experts:
        raise ValueError("expert parallelism is for models with experts; this one has none")
    if experts and layout.expert_parallel and experts.count % layout.ranks:
        raise ValueError(f"{layout.ranks} ranks do not divide its {experts.count} experts")
    if experts and not layout.expert_parallel and experts.intermediate % layout.ranks:
        raise ValueError(
            f"{layout.ranks} ranks do not divide an expert's intermediate size {experts.intermediate}; "
            "enable expert parallelism, which keeps experts whole"
        )


def weights(shape: ModelShape, layout: Layout) -> list[Part]:
    """The weights of a rank by kind, the same on every rank.

    A matrix that tensor parallelism splits counts 1/tensor of its elements, key heads are repeated where there
    are fewer of them than ranks, norms and gates are whole on every rank. Experts: ``count``/ranks whole ones
    with expert parallelism, otherwise 1/ranks of each, over the ranks of all replicas
    (vLLM: ``FusedMoEParallelConfig.make``).

    Raises:
        ValueError: as :func:`check`.
    """
    check(shape, layout)
    size = DTYPES[shape.dtype]
    attention = _latent(shape, shape.latent, layout) if shape.latent else _attention(shape, layout)
    rows = -(-shape.vocabulary // VOCABULARY_ALIGNMENT) * VOCABULARY_ALIGNMENT // layout.tensor
    parts = [
        Part(name="embedding", elements=rows * shape.hidden, bytes=rows * shape.hidden * size),
        Part(name="attention", elements=shape.layers * attention, bytes=shape.layers * attention * size),
    ]
    norms = (2 * shape.layers + 1) * shape.hidden
    parts.append(Part(name="norms", elements=norms, bytes=norms * size))
    plain = shape.layers - (len(shape.experts.layers) if shape.experts else 0)
    if plain:
        feed = 3 * shape.hidden * shape.intermediate // layout.tensor
        if shape.mlp_bias:
            feed += 2 * shape.intermediate // layout.tensor + shape.hidden
        parts.append(Part(name="feed-forward", elements=plain * feed, bytes=plain * feed * size))
    if shape.experts:
        parts.extend(_experts(shape, shape.experts, layout, size))
    if not shape.tied:
        parts.append(Part(name="output", elements=rows * shape.hidden, bytes=rows * shape.hidden * size))
    return parts


def _attention(shape: ModelShape, layout: Layout) -> int:
    """Elements of a layer: Q, K, V and output projections, their biases, norms of heads."""
    query = shape.heads // layout.tensor * shape.head
    keys = max(1, shape.kv_heads // layout.tensor) * shape.head
    elements = (query + 2 * keys) * shape.hidden + query * shape.hidden
    elements += (query + 2 * keys) if shape.qkv_bias else 0
    elements += shape.hidden if shape.out_bias else 0
    return elements + (2 * shape.head if shape.head_norms else 0)


def _latent(shape: ModelShape, latent: Latent, layout: Layout) -> int:
    """Elements of a layer: the down-projections and their norms are whole on every rank, the up-projections
    are split by heads (DeepSeek-V2, equations 9 to 19).
    """
    heads = shape.heads // layout.tensor
    elements = shape.hidden * (latent.kv_rank + latent.rope) + latent.kv_rank
    if latent.q_rank:
        elements += shape.hidden * latent.q_rank + latent.q_rank + latent.q_rank * heads * shape.head
    else:
        elements += shape.hidden * heads * shape.head
    return (
        elements + latent.kv_rank * heads * (latent.nope + latent.value) + heads * latent.value * shape.hidden
    )


def _experts(shape: ModelShape, experts: Experts, layout: Layout, size: int) -> Iterator[Part]:
    layers = len(experts.layers)
    gate, bias = experts.count * shape.hidden, experts.count if experts.biased else 0
    yield Part(
        name="gates",
        elements=layers * (gate + bias),
        bytes=layers * (gate * (experts.gate_bytes or size) + bias * 4),
    )
    whole = experts.count * 3 * shape.hidden * experts.intermediate
    held = layers * whole // layout.ranks
    yield Part(name="experts", elements=held, bytes=held * size)
    if experts.shared:
        ranks = 1 if spreads_tokens(shape, layout) else layout.tensor
        if experts.shared % ranks:
            raise ValueError(
                f"tensor_parallel_size {ranks} does not divide its shared experts' size {experts.shared}"
            )
        shared = layers * 3 * shape.hidden * experts.shared // ranks
        yield Part(name="shared experts", elements=shared, bytes=shared * size)


def derived(shape: ModelShape, layout: Layout) -> list[Part]:
    """Tensors that are made from the weights or the configuration at start and stay.

    The table of cosines and sines, one for all layers; for latent attention the up-projections of keys and
    values a second time, in the form that decode steps read (``plugin/attention/mla.py``).
    """
    size = DTYPES[shape.dtype]
    table = shape.rotary_positions * shape.rotary
    parts = [Part(name="rotary table", elements=table, bytes=table * size)]
    if shape.latent:
        heads = shape.heads // layout.tensor
        up = shape.layers * heads * shape.latent.kv_rank * (shape.latent.nope + shape.latent.value)
        parts.append(Part(name="absorbed projections", elements=up, bytes=up * size))
    return parts
