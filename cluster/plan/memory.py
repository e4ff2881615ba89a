"""The memory ledger of one NPU: what each use takes, and what is left for the KV cache.

Everything follows from the model's configuration, the layout and vLLM's limits of a step. Weights, tables and
the bytes of a token's KV cache are exact. Activations and graph pools are the largest set of tensors that the
plugin's layers hold at one moment. Not counted, because it is not known without the device: workspaces that
operators take for themselves, and what the driver keeps for streams and captured graphs; the share of memory that
``gpu_memory_utilization`` leaves out is for these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .activations import Step, activations
from .model import DTYPES, ModelShape
from .weights import Layout, Part, check, derived, spreads_tokens, weights

GIB = 1 << 30
BLOCK = 128
"""Tokens of a KV block (``docs/kv-cache.md``)."""
CHIPS = ("A2", "A3")
HCCL_BUFFERS = 2
"""Buffers of HCCL_BUFFSIZE that each communicator takes on every NPU, one to send and one to receive (CANN
documentation of HCCL_BUFFSIZE).
"""
MC2_TOP_K, MC2_EXPERTS = 16, 1024
MC2_NODES, MC2_MESH = (16, 32, 64), (128, 256)
"""Ranks on A2 over which fused dispatch and combine go by nodes, or straight (torch_npu's documentation)."""
MARKS = 512
"""Bytes that they return beside each row."""
LARGEST_GRAPH = 512
"""vLLM's largest default capture size (``VllmConfig._set_cudagraph_sizes``)."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a step and the memory; the names and defaults are vLLM's, for a server."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.92
    enforce_eager: bool = False
    hbm: int = 64 * GIB
    """Bytes of an NPU's memory: 64 GiB on Ascend 910B1 to B3 and on a die of 910C, 32 GiB on B4."""
    hccl_buffsize: int = 200
    """MB, as the environment variable HCCL_BUFFSIZE."""
    chip: str = "A2"


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The memory of one NPU, in bytes."""

    shape: ModelShape
    layout: Layout
    limits: Limits
    weights: tuple[Part, ...]
    derived: tuple[Part, ...]
    activations: int
    graphs: int
    groups: tuple[str, ...]
    """The HCCL groups that this rank opens."""
    hccl: int
    kv_per_token: int

    @property
    def weight_bytes(self) -> int:
        """Weights and what is derived from them."""
        return sum(part.bytes for part in (*self.weights, *self.derived))

    @property
    def budget(self) -> int:
        """What vLLM may use of the NPU's memory."""
        return int(self.limits.hbm * self.limits.gpu_memory_utilization)

    @property
    def used(self) -> int:
        """Everything but the KV cache."""
        return self.weight_bytes + self.activations + self.graphs + self.hccl

    @property
    def max_length(self) -> int:
        """Tokens of the longest request."""
        return self.limits.max_model_len or self.shape.max_length

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV cache that fit, in whole blocks; 0 if none does. Ranks that share a sequence's cache have
        each its part of a block's tokens.
        """
        blocks = max(0, self.budget - self.used) // (self.kv_per_token * BLOCK)
        return blocks * BLOCK * self.layout.context

    @property
    def fits(self) -> bool:
        """Whether the longest request fits, which vLLM asks for before it starts."""
        return self.kv_tokens >= self.max_length


def ledger(shape: ModelShape, layout: Layout, limits: Limits | None = None) -> Ledger:
    """Return the ledger of one NPU of an engine; of several stages, or kinds of ranks, that of the fullest.

    Raises:
        ValueError: for a layout in which the model cannot be split.
    """
    check(shape, layout)
    found = (of_rank(shape, rank, limits or Limits()) for rank in kinds_of_ranks(layout))
    return min(found, key=lambda it: it.kv_tokens)


def kinds_of_ranks(layout: Layout) -> list[Layout]:
    """The layout as each kind of its ranks sees it: every stage, without and with routed experts."""
    alone = (False, True) if layout.shared.ranks else (False,)
    stages = range(layout.pipeline)
    return [replace(layout, stage=stage, on_shared_rank=kind) for stage in stages for kind in alone]


def of_rank(shape: ModelShape, layout: Layout, limits: Limits) -> Ledger:
    """The ledger of the ranks that ``layout`` means."""
    parts = tuple(weights(shape, layout))
    all_to_all = moves_rows(shape, layout, limits.chip, limits.max_num_batched_tokens, small_step(limits))
    groups = hccl_groups(shape, layout, all_to_all=all_to_all, mc2=opens_mc2(shape, layout, limits.chip))
    step = Step(
        tokens=limits.max_num_batched_tokens,
        rows=limits.max_num_seqs,
        all_to_all=all_to_all,
        context=expanded_context(shape, limits),
    )
    return Ledger(
        shape=shape,
        layout=layout,
        limits=limits,
        weights=parts,
        derived=tuple(derived(shape, layout)),
        activations=activations(shape, layout, step),
        graphs=0 if limits.enforce_eager else graph_pool(shape, layout, limits),
        groups=groups,
        hccl=len(groups) * HCCL_BUFFERS * limits.hccl_buffsize * (1 << 20),
        kv_per_token=kv_per_token(shape, layout),
    )


def kv_per_token(shape: ModelShape, layout: Layout) -> int:
    """Bytes of KV cache that a token takes on a rank that has it.

    Dense attention: keys and values of the rank's key heads, at least one, in each layer. Latent attention: one
    latent and one rotary part in each layer, whole on every rank (DeepSeek-V2, section 2.1.3). Layers with a
    sliding window count like the others. With decode context parallel a rank has one of ``context`` tokens.
    """
    size, layers = DTYPES[shape.dtype], len(layout.layers(shape))
    if shape.latent:
        return layers * (shape.latent.kv_rank + shape.latent.rope) * size
    return layers * 2 * max(1, shape.kv_heads // layout.tensor) * shape.head * size


def small_step(limits: Limits) -> int:
    """Tokens up to which experts are met by all-gather on every chip (``plugin/moe/communication``)."""
    return max(limits.max_num_seqs, 0 if limits.enforce_eager else capture_sizes(limits)[-1])


def moves_rows(shape: ModelShape, layout: Layout, chip: str, tokens: int, small: int) -> bool:
    """Whether a step of ``tokens`` sends rows to their experts by all-to-all (``docs/experts.md``)."""
    experts = shape.experts
    if experts is None or layout.expert_ranks == 1 or chip == "A2" or layout.shared.ranks:
        return False
    return tokens > small and experts.top_k < layout.expert_ranks


def opens_mc2(shape: ModelShape, layout: Layout, chip: str) -> bool:
    """Whether small steps may go through fused dispatch and combine, which have a group of their own
    (``docs/experts.md``): the operators take the layer, and rows move less than by all-gather.
    """
    experts, ranks = shape.experts, layout.expert_ranks
    if experts is None or ranks == 1 or DTYPES[shape.dtype] != 2:
        return False
    gathers = layout.tensor > 1 and layout.data == 1
    less = 2 * experts.top_k <= ranks if gathers else experts.top_k < ranks
    less = less or layout.shared.ranks > 0
    if not less or experts.top_k > MC2_TOP_K or experts.count > MC2_EXPERTS:
        return False
    if chip == "A2":
        hierarchy = ranks in MC2_NODES and shape.hidden <= 10240
        mesh = ranks in MC2_MESH and shape.hidden <= 7168 and experts.count // ranks <= 24
        return shape.hidden % 32 == 0 and (hierarchy or mesh)
    return ranks <= 768 and 1024 <= shape.hidden <= 8192


def hccl_groups(shape: ModelShape, layout: Layout, *, all_to_all: bool, mc2: bool) -> tuple[str, ...]:
    """The groups of more than one rank whose collectives the plugin calls; HCCL opens a communicator at the first.

    Tensor parallel: the sums of attention and feed-forward layers. Decode context parallel: queries and partial
    results of attention. Pipeline: what a stage hands to the next.
    Between the replicas of a model with experts: the data-parallel group, or the expert-parallel one where tokens
    are spread over tensor-parallel ranks too, or where rows go to their experts by all-to-all. Fused dispatch and
    combine have one that nothing else uses.
    """
    names = ["tensor parallel"] if layout.tensor > 1 else []
    if layout.context > 1:
        names.append("decode context parallel")
    if layout.pipeline > 1:
        names.append("pipeline parallel")
    if shape.experts and layout.data > 1 and not spreads_tokens(shape, layout):
        names.append("data parallel")
    if spreads_tokens(shape, layout) or all_to_all:
        names.append("expert parallel")
    if mc2:
        names.append("dispatch and combine")
    return tuple(names)


def expanded_context(shape: ModelShape, limits: Limits) -> int:
    """Earlier tokens whose heads are expanded at once when latent attention prefills
    (vLLM: ``MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size``); 0 for other attention.
    """
    if shape.latent is None:
        return 0
    length = limits.max_model_len or shape.max_length
    wanted = max(8 * length, 4 * limits.max_num_seqs * BLOCK)
    return max(min(wanted, 64 * 1024), limits.max_num_seqs * BLOCK)


def capture_sizes(limits: Limits) -> list[int]:
    """Batches that are captured as graphs: vLLM's default sizes up to the largest decode batch."""
    largest = min(2 * limits.max_num_seqs, LARGEST_GRAPH, limits.max_num_batched_tokens)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return sorted({size for size in sizes if size <= largest} | {min(limits.max_num_seqs, largest)})


def graph_pool(shape: ModelShape, layout: Layout, limits: Limits) -> int:
    """Bytes of the pool that all graphs share: the activations of the largest decode step, without logits,
    which are computed outside; and the output [size, hidden] of each captured size up to the largest batch. Steps
    that go through fused dispatch and combine hold no more rows than those of all-gather, and their marks.
    """
    sizes = [size for size in capture_sizes(limits) if size <= limits.max_num_seqs]
    outputs = sum(sizes) * shape.hidden * DTYPES[shape.dtype]
    marks = 0
    if shape.experts and opens_mc2(shape, layout, limits.chip):
        local = shape.experts.count // layout.routed_ranks
        rows = -(-sizes[-1] // layout.tensor) * layout.expert_ranks * min(local, shape.experts.top_k)
        marks = rows * MARKS
    step = Step(tokens=sizes[-1], rows=0, all_to_all=False, context=0)
    return activations(shape, layout, step) + outputs + marks
