"""The most memory that one step's tensors take at a time, beside weights and caches.

Each formula adds up what the layer's code holds at its fullest moment. Sizes are per rank; b is the bytes of an
element, T the step's tokens, H the hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model import DTYPES, Experts, Latent, ModelShape
from .weights import VOCABULARY_ALIGNMENT, Layout, spreads_tokens, whole_shared

FLOAT = 4
SAMPLING_COPIES = 4
"""float32 copies of the logits while sampling: the logits, filtered logits, probabilities, noise."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of an engine."""

    tokens: int
    rows: int
    """Tokens whose logits are wanted."""
    all_to_all: bool
    """Whether rows go to their experts one by one; otherwise every rank gets every token."""
    context: int
    """Earlier tokens that latent attention expands at a time."""


def activations(shape: ModelShape, layout: Layout, step: Step) -> int:
    """Bytes at the fullest moment of a step: in attention, in a feed-forward layer, among the experts, at a norm or
    at the logits, whichever takes most. Around the first three lie the residual and the hidden states as the layer
    was given them and as they are now, 4 T H b; a norm adds a layer's output to the residual and makes two anew, so
    that there are 6 T H b and a float32 number for each token. Quantized layers hold a copy of what goes into them, a
    byte for an element: the hidden states before attention, and the longest input of a feed-forward.
    """
    size, tokens = DTYPES[shape.dtype], step.tokens
    row = tokens * shape.hidden * size
    stream = 4 * row
    copies = int(shape.quantization is not None and shape.quantization.quantizes_inputs)
    moments = [
        stream + copies * tokens * shape.hidden + attention(shape, layout, step),
        logits(shape, layout, step),
        6 * row + tokens * FLOAT,
    ]
    if shape.experts is None or len(shape.experts.layers) < shape.layers:
        middle = shape.intermediate // layout.tensor
        held = feed_forward(middle, tokens, shape.hidden) * size
        moments.append(stream + held + copies * tokens * max(middle, shape.hidden))
    if shape.experts:
        wide = max(shape.hidden, shape.experts.intermediate)
        rows = tokens * shape.experts.top_k * (1 if step.all_to_all else layout.data)
        moments.append(stream + experts(shape, shape.experts, layout, step) + copies * rows * wide)
        moments.append(stream + shared_experts(shape, shape.experts, layout, tokens)[1])
    return max(moments)


def attention(shape: ModelShape, layout: Layout, step: Step) -> int:
    """Dense: the fused projection, rotated queries and keys, the output; with decode context parallel the output
    once more, and what :func:`spread` counts. Latent: see :func:`latent_attention`.
    """
    size, heads = DTYPES[shape.dtype], shape.heads // layout.tensor
    if shape.latent:
        prefill = latent_attention(shape.latent, heads, shape, layout, step) * size
        if layout.context == 1:
            return prefill
        latents, decodes = shape.latent.kv_rank, step.rows or step.tokens
        absorbed = heads * (shape.latent.nope + 2 * shape.latent.rope + latents) * size
        return max(
            prefill, decodes * (absorbed + spread(heads, latents + shape.latent.rope, latents, layout, size))
        )
    query, keys = heads * shape.head, max(1, shape.kv_heads // layout.tensor) * shape.head
    own = ((query + 2 * keys) + (query + keys) + query) * size
    if layout.context > 1:
        own += query * size + spread(heads, shape.head, shape.head, layout, size)
    return step.tokens * own


def spread(heads: int, key: int, value: int, layout: Layout, size: int) -> int:
    """Bytes of a token while partial results of decode context parallel are merged: the queries of all its ranks'
    heads, the output, its share in float32 and that rounded.
    """
    return heads * layout.context * (key * size + value * (2 * size + FLOAT))


def latent_attention(latent: Latent, heads: int, shape: ModelShape, layout: Layout, step: Step) -> int:
    """Elements while a prefill expands heads: down-projections, queries twice (projected, rotated), keys, values
    and what they are cut from, the output twice; the same of the earlier tokens of a chunk, and their partial
    output and its merger. With decode context parallel a chunk is read in rows of each rank, which are gathered.
    """
    key, both = latent.nope + latent.rope, latent.nope + latent.value
    down = (latent.q_rank or 0) + 2 * (latent.kv_rank + latent.rope)
    new = down + heads * (2 * key + both + key + latent.value + 2 * latent.value)
    earlier = latent.kv_rank + latent.rope + heads * (both + key + latent.value)
    merging = heads * 2 * latent.value if step.context else 0
    gathered = 0
    if layout.context > 1:
        gathered = (step.context + step.context // layout.context) * (latent.kv_rank + latent.rope)
    return step.tokens * (new + merging) + step.context * earlier + gathered


def feed_forward(intermediate: int, tokens: int, hidden: int) -> int:
    """Elements of a gated layer: gate, up, their product and the output."""
    return tokens * (3 * intermediate + hidden)


def experts(shape: ModelShape, experts: Experts, layout: Layout, step: Step) -> int:
    """Bytes of a layer with experts: the shared experts' output and the gate's scores; with all-gather, the
    tokens of all replicas, a row for each of their choices, the rows' feed-forward and the sum; with all-to-all,
    the rows sent, received, sorted, computed and put back in order, spread evenly. A rank with shared experts alone:
    the tokens of all replicas, its part of them through the shared experts, and the sum.

    Without expert parallelism the intermediate size of an expert is split over all ranks.
    """
    size, hidden, spread = DTYPES[shape.dtype], shape.hidden, spreads_tokens(shape, layout)
    middle = experts.intermediate if layout.expert_parallel else experts.intermediate // layout.ranks
    own = -(-step.tokens // layout.tensor) if spread else step.tokens
    shared, computing = shared_experts(shape, experts, layout, step.tokens)
    if layout.shared.overlap:
        shared = computing
    # the gate's logits in the model's dtype, in float32, and the scores that choose
    scores = own * experts.count * (size + 2 * FLOAT)
    if step.all_to_all:
        rows = -(-step.tokens // layout.tensor) * experts.top_k
        held = 3 * rows * hidden + rows * max(3 * middle, middle + hidden, 2 * hidden)
        return shared + scores + (held + step.tokens * hidden) * size
    tokens = own * layout.tensor * layout.data if spread else own * layout.data
    if layout.on_shared_rank:
        part = -(-tokens // layout.shared.ranks)
        held = 2 * tokens * hidden + feed_forward(experts.shared, part, hidden)
        return scores + (held + own * hidden) * size
    gathered = tokens * hidden + (own * hidden if spread else 0) if layout.data > 1 else 0
    rows = tokens * experts.top_k
    held = rows * hidden + max(rows * max(3 * middle, middle + hidden), (rows + tokens) * hidden)
    return shared + scores + (gathered + held) * size


def shared_experts(shape: ModelShape, experts: Experts, layout: Layout, tokens: int) -> tuple[int, int]:
    """Bytes of a layer's shared experts for a step of ``tokens``: what is held of them while the routed ones are
    computed, and the most while they are computed themselves.

    Whole, they are computed for a rank's part of the tokens; sliced, for all of the replica's, which are gathered where
    they are spread.
    """
    if not experts.shared or layout.shared.ranks:
        return 0, 0
    size, whole = DTYPES[shape.dtype], whole_shared(shape, layout)
    part = -(-tokens // layout.tensor) if whole else tokens
    gathered = part * shape.hidden if spreads_tokens(shape, layout) and not whole else 0
    middle = experts.shared if whole else experts.shared // layout.tensor
    return part * shape.hidden * size, (gathered + feed_forward(middle, part, shape.hidden)) * size


def logits(shape: ModelShape, layout: Layout, step: Step) -> int:
    """Bytes of the rows' logits: as the model's dtype, gathered from all ranks, and the float32 copies of the
    sampler; beside the hidden states.
    """
    size = DTYPES[shape.dtype]
    width = -(-shape.vocabulary // VOCABULARY_ALIGNMENT) * VOCABULARY_ALIGNMENT
    gathered = 2 * width if layout.tensor > 1 else 0
    copies = (width // layout.tensor + gathered) * size + SAMPLING_COPIES * FLOAT * width
    return (step.tokens + step.rows) * shape.hidden * size + step.rows * copies
