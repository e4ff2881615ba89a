"""References of what multi-head latent attention (MLA, DeepSeek-V2, 2024) needs around its attention.

The sizes are those that the device takes: latents of 512 elements and rotary parts of 64. The device takes
fp16 and bf16; float32 is accepted here because it is what proves that a model's tokens equal those of
another implementation. Products and sums are float32, rounded once.
"""

import torch

from .checks import FLOATS, refuse_arguments, require, require_contiguous, require_dtype, wrong
from .registry import reference

LATENT, ROPE = 512, 64
MOST_PARTS = 16  # partial results that aclnnAttentionUpdate merges at most


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x·cos + turn(x)·sin in float32, after the neighbours 2i and 2i + 1 of ``x`` went to places i and i + d/2.

    ``turn`` is (−b, a) of the two halves. The result stays in halves: it is a permutation of the heads that
    an interleaved rotation gives, the same for queries and keys, so their products are equal.
    """
    a, b = x[..., ::2].float(), x[..., 1::2].float()
    halves, turned = torch.cat((a, b), dim=-1), torch.cat((-b, a), dim=-1)
    return halves * cos.float() + turned * sin.float()


def _check_angles(op: str, x: torch.Tensor, tokens: tuple[int, int], **angles: torch.Tensor) -> None:
    """cos and sin [B, 1, S, 64] like x, contiguous; S may be 1."""
    for name, angle in angles.items():
        require(angle.dtype == x.dtype, op, f"{name} is {angle.dtype}, x is {x.dtype}; they must be equal")
        batch, length = tokens
        fits = angle.dim() == 4 and angle.shape[0] == batch and angle.shape[1] == 1
        fits = fits and angle.shape[2] in (1, length) and angle.shape[3] == ROPE
        require(fits, op, f"{name} {tuple(angle.shape)} must be [{batch}, 1, {length}, {ROPE}]")
    require_contiguous(op, **angles)


@reference("npu::npu_interleave_rope")
def npu_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [B, N, S, 64], whose pairs are neighbours, by cos and sin [B, 1, S, 64] (each the 32 values
    twice). Returns the rotated heads with their pairs as halves. Source: CANN's aclnnInterleaveRope.
    """
    op = "npu_interleave_rope"
    require_dtype(op, "x", x, FLOATS)
    require(x.dim() == 4 and x.shape[3] == ROPE, op, f"x {tuple(x.shape)} must be [B, N, S, {ROPE}]")
    require_contiguous(op, x=x)
    _check_angles(op, x, (x.shape[0], x.shape[2]), cos=cos, sin=sin)
    return turn(x, cos, sin).to(x.dtype)


def _check_latent_write(
    op: str,
    kv: torch.Tensor,
    gamma: torch.Tensor,
    index: torch.Tensor,
    caches: dict[str, tuple[torch.Tensor, int]],
) -> None:
    require_dtype(op, "kv", kv, FLOATS)
    fits = kv.dim() == 4 and kv.shape[1] == 1 and kv.shape[3] == LATENT + ROPE
    require(fits, op, f"kv {tuple(kv.shape)} must be [B, 1, S, {LATENT + ROPE}]")
    require(gamma.dtype == kv.dtype, op, f"gamma is {gamma.dtype}, kv is {kv.dtype}; they must be equal")
    require(tuple(gamma.shape) == (LATENT,), op, f"gamma {tuple(gamma.shape)} must be [{LATENT}]")
    tokens = kv.shape[0] * kv.shape[2]
    require_dtype(op, "index", index, (torch.int64,))
    require(tuple(index.shape) == (tokens,), op, f"index {tuple(index.shape)} must be [{tokens}]")
    first = caches["k_cache"][0].shape[:2]
    for name, (cache, width) in caches.items():
        require(cache.dtype == kv.dtype, op, f"{name} is {cache.dtype}, kv is {kv.dtype}; they must be equal")
        fits = cache.dim() == 4 and cache.shape[:2] == first and tuple(cache.shape[2:]) == (1, width)
        require(fits, op, f"{name} {tuple(cache.shape)} must be [blocks, block, 1, {width}]")
        require_contiguous(op, **{name: cache})
    require_contiguous(op, kv=kv, gamma=gamma, index=index)
    if tokens:
        written = index[index >= 0]
        count = first[0] * first[1]
        require(int(index.min()) >= -1, op, "an index lies below −1")
        require(not written.numel() or int(written.max()) < count, op, f"an index lies above {count - 1}")
        require(written.unique().numel() == written.numel(), op, "an index comes twice")


@reference("npu::npu_kv_rmsnorm_rope_cache")
def npu_kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm the first 512 elements of kv [B, 1, S, 576], rotate the last 64, and write both to their pages.

    Pages as in ``cache_mode`` "PA": k_cache [blocks, block, 1, 64], ckv_cache [blocks, block, 1, 512], in
    place; index int64 [B·S] holds slots, and what is below 0 is skipped. Returns (k_cache, ckv_cache, the
    rotated parts, the normed parts); the last two hold values only with ``is_output_kv``. Source: CANN's
    aclnnKvRmsNormRopeCache.
    """
    op = "npu_kv_rmsnorm_rope_cache"
    optional = {
        "k_rope_scale": k_rope_scale,
        "c_kv_scale": c_kv_scale,
        "k_rope_offset": k_rope_offset,
        "c_kv_offset": c_kv_offset,
        "v": v,
    }
    refuse_arguments(op, optional, dict.fromkeys(optional))
    if cache_mode not in ("PA", "PA_BNSD"):
        raise NotImplementedError(f"{op}: no reference for cache_mode={cache_mode!r} (only 'PA', 'PA_BNSD')")
    caches = {"k_cache": (k_cache, ROPE), "ckv_cache": (ckv_cache, LATENT)}
    _check_latent_write(op, kv, gamma, index, caches)
    _check_angles(op, kv, (kv.shape[0], kv.shape[2]), cos=cos, sin=sin)
    latent = torch.nn.functional.rms_norm(kv[..., :LATENT].float(), (LATENT,), gamma.float(), epsilon)
    latent, rope = latent.to(kv.dtype), turn(kv[..., LATENT:], cos, sin).to(kv.dtype)
    keep = index >= 0
    slots = index[keep]
    k_cache.view(-1, ROPE).index_copy_(0, slots, rope.view(-1, ROPE)[keep])
    ckv_cache.view(-1, LATENT).index_copy_(0, slots, latent.view(-1, LATENT)[keep])
    if not is_output_kv:  # memory that the operator leaves as it found it
        latent, rope = torch.full_like(latent, torch.nan), torch.full_like(rope, torch.nan)
    return k_cache, ckv_cache, rope, latent


@reference("npu::npu_gather_pa_kv_cache")
def npu_gather_pa_kv_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_offset: torch.Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Copy the tokens of each request from pages [blocks, block, heads, d] into packed key and value
    [tokens, heads, d], in place.

    ``block_tables`` int32 [B, n], ``seq_lens`` int32 [B] tokens of each request from ``seq_offset`` int32 [B]
    on, which lies on a block's first token. Source: CANN's aclnnGatherPaKvCache.
    """
    op = "npu_gather_pa_kv_cache"
    if is_seq_lens_cumsum:
        raise NotImplementedError(f"{op}: no reference for is_seq_lens_cumsum=True (only False)")
    lists = {"block_tables": block_tables, "seq_lens": seq_lens}
    if seq_offset is not None:
        lists["seq_offset"] = seq_offset
    for name, x in lists.items():
        require_dtype(op, name, x, (torch.int32,))
        require(x.shape[:1] == block_tables.shape[:1], op, f"{name} {tuple(x.shape)} is not of B requests")
    pages = {"key": (key_cache, key), "value": (value_cache, value)}
    lengths = seq_lens.tolist()
    for name, (cache, packed) in pages.items():
        require(cache.dtype == packed.dtype, op, f"{name} is {packed.dtype}, {name}_cache is {cache.dtype}")
        fits = cache.dim() == 4 and tuple(packed.shape) == (sum(lengths), *cache.shape[2:])
        shapes = f"{name} {tuple(packed.shape)} and {name}_cache {tuple(cache.shape)}"
        require(fits, op, f"{shapes} must be [{sum(lengths)}, heads, d] and [blocks, block, heads, d]")
        require_contiguous(op, **{name: packed, f"{name}_cache": cache})
    require_contiguous(op, **lists)
    require(key_cache.shape[:2] == value_cache.shape[:2], op, "key_cache and value_cache differ in blocks")
    blocks, block = key_cache.shape[:2]
    offsets = [0] * len(lengths) if seq_offset is None else seq_offset.tolist()
    done = 0
    for request, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
        require(length >= 0 and offset >= 0, op, "a length or an offset is negative")
        require(offset % block == 0, op, f"seq_offset {offset} is not a multiple of the block size {block}")
        if not length:
            continue
        place = torch.arange(offset, offset + length)
        require(int(place[-1]) // block < block_tables.shape[1], op, "block_tables has too few columns")
        page = block_tables[request].long()[place // block]
        require(
            int(page.min()) >= 0 and int(page.max()) < blocks, op, f"a block lies outside 0 … {blocks - 1}"
        )
        for cache, packed in pages.values():
            packed[done : done + length] = cache[page, place % block]
        done += length


@reference("npu::npu_attention_update")
def npu_attention_update(
    lse: list[torch.Tensor], local_out: list[torch.Tensor], update_type: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys: with m = log Σ exp(lseᵢ), the output is Σ outᵢ · exp(lseᵢ − m).

    lse float32 [n] and local_out [n, d] of each part. Returns (the output like one part, m); m holds values
    only with ``update_type`` 1. Source: torch_npu's documentation of ``npu_attention_update``.
    """
    op = "npu_attention_update"
    if update_type not in (0, 1):
        raise wrong(op, f"update_type is {update_type}, allowed are 0 and 1")
    require(1 <= len(lse) <= MOST_PARTS, op, f"{len(lse)} parts are given, 1 to {MOST_PARTS} are allowed")
    require(len(lse) == len(local_out), op, f"{len(lse)} lse but {len(local_out)} local_out")
    rows, size = local_out[0].shape
    require(size % 8 == 0 and size <= 512, op, f"d is {size}, it must be a multiple of 8 up to 512")
    for one, out in zip(lse, local_out, strict=True):
        require_dtype(op, "lse", one, (torch.float32,))
        require_dtype(op, "local_out", out, (local_out[0].dtype,))
        require(tuple(one.shape) == (rows,), op, f"lse {tuple(one.shape)} must be [{rows}]")
        require(out.shape == (rows, size), op, f"local_out {tuple(out.shape)} must be [{rows}, {size}]")
        require_contiguous(op, lse=one, local_out=out)
    weights = torch.stack(lse)
    total = weights.logsumexp(0)
    shares = (weights - total).exp().unsqueeze(-1)
    out = (torch.stack([x.float() for x in local_out]) * shares).sum(0).to(local_out[0].dtype)
    return out, total if update_type == 1 else torch.full_like(total, torch.nan)


@reference("npu::npu_transpose_batchmatmul")
def npu_transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """Multiply each head of input [T, N, K] by its own weight [N, K, M]; the result is [T, N, M].

    Only ``perm_x1`` = ``perm_y`` = [1, 0, 2] has a reference. Source: CANN's aclnnTransposeBatchMatMul.
    """
    op = "npu_transpose_batchmatmul"
    optional = {"bias": bias, "scale": scale, "batch_split_factor": batch_split_factor}
    refuse_arguments(op, optional, {"bias": None, "scale": None, "batch_split_factor": 1})
    for name, perm, only in (("perm_x1", perm_x1, [1, 0, 2]), ("perm_y", perm_y, [1, 0, 2])):
        if perm is None or list(perm) != only:
            raise NotImplementedError(f"{op}: no reference for {name}={perm} (only {only})")
    if perm_x2 is not None and list(perm_x2) != [0, 1, 2]:
        raise NotImplementedError(f"{op}: no reference for perm_x2={perm_x2} (only [0, 1, 2])")
    require_dtype(op, "input", input, FLOATS)
    require(weight.dtype == input.dtype, op, f"weight is {weight.dtype}, input is {input.dtype}")
    fits = input.dim() == weight.dim() == 3 and tuple(input.shape[1:]) == tuple(weight.shape[:2])
    shapes = f"input {tuple(input.shape)} and weight {tuple(weight.shape)}"
    require(fits, op, f"{shapes} must be [T, N, K] and [N, K, M]")
    heads, inner, outer = weight.shape
    require(inner % 128 == 0 and outer % 128 == 0, op, f"K {inner} and M {outer} must be multiples of 128")
    require(heads * inner < 65536, op, f"N·K is {heads * inner}, it must be below 65,536")
    require_contiguous(op, input=input, weight=weight)
    return torch.bmm(input.transpose(0, 1), weight).transpose(0, 1).contiguous()
