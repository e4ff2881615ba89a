"""The weights of one rank, as vLLM splits them over NPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .model import DTYPES, Experts, ModelShape
from .quantization import INT8_DYNAMIC
from .shared import AS_VLLM, AUTO, WHOLE, SharedExperts

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
    pipeline: int = 1
    """Stages of layers."""
    context: int = 1
    """Of the tensor-parallel ranks, how many share the KV cache of a sequence (decode context parallel)."""
    stage: int = 0
    """The stage whose ranks are meant."""
    shared: SharedExperts = AS_VLLM
    on_shared_rank: bool = False
    """Whether those of its ranks are meant that hold the shared experts and no others."""

    @property
    def ranks(self) -> int:
        """Ranks of a stage."""
        return self.tensor * self.data

    @property
    def npus(self) -> int:
        """NPUs of the engine."""
        return self.ranks * self.pipeline

    def layers(self, shape: ModelShape) -> range:
        """The layers of the stage: as many in each, what is left over one each from the last but one on backwards
        (vLLM: ``distributed/utils.py: get_pp_indices``).
        """
        each, left = divmod(shape.layers, self.pipeline)
        sizes = [each + (self.pipeline - 1 - left <= i < self.pipeline - 1) for i in range(self.pipeline)]
        start = sum(sizes[: self.stage])
        return range(start, start + sizes[self.stage])

    @property
    def is_last(self) -> bool:
        """Whether the stage has the output layer."""
        return self.stage == self.pipeline - 1

    @property
    def expert_ranks(self) -> int:
        """Ranks that tokens and experts meet over; 1 without expert parallelism."""
        return self.ranks if self.expert_parallel else 1

    @property
    def routed_ranks(self) -> int:
        """Ranks that hold routed experts."""
        return self.ranks - self.shared.ranks


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


def whole_shared(shape: ModelShape, layout: Layout) -> bool:
    """Whether ranks hold shared experts whole, for tokens of their own, in place of a slice for all tokens."""
    asked = layout.shared
    if asked.ranks or asked.placement == WHOLE:
        return True
    return asked.placement == AUTO and spreads_tokens(shape, layout)


def check(shape: ModelShape, layout: Layout) -> None:
    """Refuse a layout in which vLLM or the plugin cannot split the model.

    Raises:
        ValueError: naming what does not divide.
    """
    tensor, experts = layout.tensor, shape.experts
    if layout.pipeline > shape.layers:
        raise ValueError(f"pipeline_parallel_size {layout.pipeline} is more than its {shape.layers} layers")
    if shape.heads % tensor:
        raise ValueError(f"tensor_parallel_size {tensor} does not divide its {shape.heads} attention heads")
    if max(shape.kv_heads, tensor) % min(shape.kv_heads, tensor) and not shape.latent:
        raise ValueError(
            f"tensor_parallel_size {tensor} and its {shape.kv_heads} key heads: neither divides the other"
        )
    if layout.context > 1:
        _check_context(shape, layout)
    plain = shape.layers - (len(experts.layers) if experts else 0)
    if plain and shape.intermediate % tensor:
        raise ValueError(
            f"tensor_parallel_size {tensor} does not divide its intermediate size {shape.intermediate}"
        )
    if layout.expert_parallel and not experts:
        raise ValueError("expert parallelism is for models with experts; this one has none")
    if layout.shared != AS_VLLM and not (experts and experts.shared):
        raise ValueError("a placement of shared experts is for models that have some; this one has none")
    if layout.shared.ranks and not layout.expert_parallel:
        raise ValueError("ranks for shared experts alone need expert parallelism")
    if layout.shared.ranks and layout.routed_ranks < 1:
        raise ValueError(f"{layout.shared.ranks} ranks for shared experts alone leave none of {layout.ranks}")
    if experts and layout.expert_parallel and experts.count % layout.routed_ranks:
        alone = " for routed experts" if layout.shared.ranks else ""
        raise ValueError(f"{layout.routed_ranks} ranks{alone} do not divide its {experts.count} experts")
    if experts and not layout.expert_parallel and experts.intermediate % layout.ranks:
        raise ValueError(
            f"{layout.ranks} ranks do not divide an expert's intermediate size {experts.intermediate}; "
            "enable expert parallelism, which keeps experts whole"
        )


def _check_context(shape: ModelShape, layout: Layout) -> None:
    """A sequence's KV cache is spread over ranks that would else hold copies of it."""
    name = f"decode_context_parallel_size {layout.context}"
    if layout.tensor % layout.context:
        raise ValueError(f"{name} does not divide tensor_parallel_size {layout.tensor}")
    if shape.latent:
        return
    copies = layout.tensor // shape.kv_heads
    if copies < 2 or copies % layout.context or shape.heads // shape.kv_heads % layout.context:
        raise ValueError(
            f"{name} does not divide the {max(copies, 1)} ranks that share each of its {shape.kv_heads} key heads, "
            f"and the {shape.heads // shape.kv_heads} query heads of one; raise tensor_parallel_size, or leave it at 1"
        )


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A linear layer's weight [rows, columns] on one rank."""

    module: str
    """Its layer's name in the checkpoint, without the number of the layer before it."""
    rows: int
    columns: int


def weights(shape: ModelShape, layout: Layout) -> list[Part]:
    """The weights of a rank by kind, the same on every rank of a stage.

    A matrix that tensor parallelism splits counts 1/tensor of its elements, key heads are repeated where there
    are fewer of them than ranks, norms and gates are whole on every rank. Experts: ``count``/ranks whole ones
    with expert parallelism, otherwise 1/ranks of each, over the ranks of all replicas
    (vLLM: ``FusedMoEParallelConfig.make``). Bytes of quantized layers include their scales.

    Raises:
        ValueError: as :func:`check`.
    """
    check(shape, layout)
    size = DTYPES[shape.dtype]
    rows = -(-shape.vocabulary // VOCABULARY_ALIGNMENT) * VOCABULARY_ALIGNMENT // layout.tensor
    table = Part(name="embedding", elements=rows * shape.hidden, bytes=rows * shape.hidden * size)
    matrices, vectors = attention(shape, layout)
    layers = layout.layers(shape)
    parts = [_linear(shape, "attention", matrices, vectors, layers)]
    if layout.stage == 0 or (layout.is_last and shape.tied):
        parts.insert(0, table)
    norms = (2 * len(layers) + layout.is_last) * shape.hidden
    parts.append(Part(name="norms", elements=norms, bytes=norms * size))
    plain = [n for n in layers if not shape.experts or n not in shape.experts.layers]
    if plain:
        matrices = feed_forward("mlp", shape.hidden, shape.intermediate // layout.tensor)
        vectors = 2 * shape.intermediate // layout.tensor + shape.hidden if shape.mlp_bias else 0
        parts.append(_linear(shape, "feed-forward", matrices, vectors, plain))
    if shape.experts:
        parts.extend(_experts(shape, shape.experts, layout, size))
    if layout.is_last and not shape.tied:
        parts.append(Part(name="output", elements=table.elements, bytes=table.bytes))
    return parts


def _linear(
    shape: ModelShape, name: str, matrices: list[Matrix], vectors: int, layers: Iterable[int]
) -> Part:
    """The same matrices, and elements of biases and norms, in each of ``layers``; each by its own scheme."""
    size, elements, total = DTYPES[shape.dtype], 0, 0
    for number in layers:
        elements += vectors
        total += vectors * size
        for matrix in matrices:
            elements += matrix.rows * matrix.columns
            total += _bytes(shape, f"model.layers.{number}.{matrix.module}", matrix)
    return Part(name=name, elements=elements, bytes=total)


def _bytes(shape: ModelShape, module: str, matrix: Matrix, *, count: int = 1, expert: bool = False) -> int:
    size = DTYPES[shape.dtype]
    scheme = shape.quantization.of(module) if shape.quantization else None
    if scheme is None:
        return count * matrix.rows * matrix.columns * size
    scale = size if shape.dtype == "bfloat16" else 4
    return scheme.bytes(matrix.rows, matrix.columns, scale if expert else size, count=count, expert=expert)


def attention(shape: ModelShape, layout: Layout) -> tuple[list[Matrix], int]:
    """The projections of a layer's attention on a rank, and the elements of its biases and norms.

    Latent attention: the down-projections and their norms are whole on every rank, the up-projections are split by
    heads (DeepSeek-V2, equations 9 to 19).
    """
    heads, hidden = shape.heads // layout.tensor, shape.hidden
    if shape.latent is None:
        query = heads * shape.head
        keys = max(1, shape.kv_heads // layout.tensor) * shape.head
        made = [("q_proj", query, hidden), ("k_proj", keys, hidden), ("v_proj", keys, hidden)]
        vectors = (query + 2 * keys) if shape.qkv_bias else 0
        vectors += hidden if shape.out_bias else 0
        vectors += 2 * shape.head if shape.head_norms else 0
        return _projections([*made, ("o_proj", hidden, query)]), vectors
    latent = shape.latent
    vectors = latent.kv_rank + (latent.q_rank or 0)
    made = [("q_proj", heads * shape.head, hidden)]
    if latent.q_rank:
        made = [("q_a_proj", latent.q_rank, hidden), ("q_b_proj", heads * shape.head, latent.q_rank)]
    made += [
        ("kv_a_proj_with_mqa", latent.kv_rank + latent.rope, hidden),
        ("kv_b_proj", heads * (latent.nope + latent.value), latent.kv_rank),
        ("o_proj", hidden, heads * latent.value),
    ]
    return _projections(made), vectors


def _projections(made: list[tuple[str, int, int]]) -> list[Matrix]:
    return [Matrix(module=f"self_attn.{name}", rows=rows, columns=columns) for name, rows, columns in made]


def feed_forward(
    module: str, hidden: int, middle: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[Matrix]:
    """Gate, up and down of a layer with ``middle`` intermediate elements on a rank."""
    gate, up, down = (f"{module}.{name}" for name in names)
    return [
        Matrix(module=gate, rows=middle, columns=hidden),
        Matrix(module=up, rows=middle, columns=hidden),
        Matrix(module=down, rows=hidden, columns=middle),
    ]


def _experts(shape: ModelShape, experts: Experts, layout: Layout, size: int) -> Iterator[Part]:
    layers = [number for number in layout.layers(shape) if number in experts.layers]
    gate, bias = experts.count * shape.hidden, experts.count if experts.biased else 0
    yield Part(
        name="gates",
        elements=len(layers) * (gate + bias),
        bytes=len(layers) * (gate * (experts.gate_bytes or size) + bias * 4),
    )
    if not layout.on_shared_rank:
        yield _routed(shape, experts, layout, layers)
    if experts.shared and (layout.on_shared_rank or not layout.shared.ranks):
        ranks = 1 if whole_shared(shape, layout) else layout.tensor
        if experts.shared % ranks:
            raise ValueError(
                f"tensor_parallel_size {ranks} does not divide its shared experts' size {experts.shared}"
            )
        matrices = feed_forward("mlp.shared_experts", shape.hidden, experts.shared // ranks)
        yield _linear(shape, "shared experts", matrices, 0, layers)


def _routed(shape: ModelShape, experts: Experts, layout: Layout, layers: list[int]) -> Part:
    """The experts of a rank. vLLM keeps all experts of a layer as it keeps the first."""
    held = experts.count // layout.routed_ranks if layout.expert_parallel else experts.count
    middle = experts.intermediate if layout.expert_parallel else experts.intermediate // layout.ranks
    block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if shape.model_type == "mixtral":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    matrices = feed_forward(f"{block}.experts.0", shape.hidden, middle, names)
    _check_experts(shape, [f"model.layers.{number}.{matrices[0].module}" for number in layers])
    return Part(
        name="experts",
        elements=len(layers) * held * sum(matrix.rows * matrix.columns for matrix in matrices),
        bytes=sum(
            _bytes(shape, f"model.layers.{number}.{matrix.module}", matrix, count=held, expert=True)
            for number in layers
            for matrix in matrices
        ),
    )


def _check_experts(shape: ModelShape, modules: Iterable[str]) -> None:
    schemes = {shape.quantization.of(module) for module in modules} if shape.quantization else set()
    for scheme in schemes - {None, INT8_DYNAMIC}:
        raise ValueError(
            f"its experts are quantized as {scheme.name if scheme else ''}; experts are served as {INT8_DYNAMIC.name} "
            "or unquantized"
        )


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
        up = (
            len(layout.layers(shape))
            * heads
            * shape.latent.kv_rank
            * (shape.latent.nope + shape.latent.value)
        )
        parts.append(Part(name="absorbed projections", elements=up, bytes=up * size))
    return parts
