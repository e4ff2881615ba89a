"""The reference of ``npu_mla_prolog_v3``: everything that decode does before it attends over latents, in one operator.

Limits and shapes are those of torch_npu's documentation of the operator (its docstring) and of CANN's
``aclnnMlaPrologV3WeightNz``; what is rounded where, that slots below 0 are skipped, and that the −1 of the rotation is
not in the sines, is read from CANN's open source of the kernel (``ops-transformer``, attention/mla_prolog).
"""

import torch

from .checks import refuse_arguments, require, require_contiguous, require_dtype
from .formats import FRACTAL_NZ, require_format
from .mla import LATENT, ROPE, turn
from .quant import quantize_tokens
from .registry import reference

OP = "npu_mla_prolog_v3"
HIDDEN = (6144, 7168, 7680)
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
QUERY_RANK, NOPE = 1536, 128
BLOCKS = (16, 128)
MOST_TOKENS = 1048576
PLAIN, ALL_QUANTIZED = 0, 2  # weight_quant_mode; 1 quantizes weight_uq_qr alone


def _check_shapes(sizes: dict[str, tuple[torch.Tensor, tuple[int, ...]]]) -> None:
    for name, (tensor, wanted) in sizes.items():
        require(tuple(tensor.shape) == wanted, OP, f"{name} {tuple(tensor.shape)} must be {list(wanted)}")


def _check(given: dict[str, torch.Tensor], quantized: bool) -> None:
    """Shapes, dtypes and layout of the operator's tensors, by their names."""
    x, key_up = given["token_x"], given["weight_uk"]
    if x.dim() != 2:
        raise NotImplementedError(f"{OP}: no reference for token_x of {x.dim()} dimensions (only [T, He])")
    require(key_up.dim() == 3, OP, f"weight_uk {tuple(key_up.shape)} must be [N, {NOPE}, {LATENT}]")
    (tokens, hidden), heads = x.shape, key_up.shape[0]
    require(hidden in HIDDEN, OP, f"He is {hidden}, allowed are {', '.join(map(str, HIDDEN))}")
    require(heads in HEADS, OP, f"N is {heads}, allowed are {', '.join(map(str, HEADS))}")
    require(tokens <= MOST_TOKENS, OP, f"T is {tokens}, at most {MOST_TOKENS} are allowed")
    sizes: dict[str, tuple[int, ...]] = {
        "weight_dq": (hidden, QUERY_RANK),
        "weight_uq_qr": (QUERY_RANK, heads * (NOPE + ROPE)),
        "weight_uk": (heads, NOPE, LATENT),
        "weight_dkv_kr": (hidden, LATENT + ROPE),
        "rmsnorm_gamma_cq": (QUERY_RANK,),
        "rmsnorm_gamma_ckv": (LATENT,),
        "rope_sin": (tokens, ROPE),
        "rope_cos": (tokens, ROPE),
        "cache_index": (tokens,),
    }
    if quantized:
        sizes |= {
            "dequant_scale_x": (tokens, 1),
            "dequant_scale_w_dq": (1, QUERY_RANK),
            "dequant_scale_w_uq_qr": (1, heads * (NOPE + ROPE)),
            "dequant_scale_w_dkv_kr": (1, LATENT + ROPE),
        }
    _check_shapes({name: (given[name], wanted) for name, wanted in sizes.items()})
    pages = given["kv_cache"].shape[:2]
    require(len(pages) == 2 and pages[1] in BLOCKS, OP, f"BlockSize must be one of {BLOCKS}")
    for name, width in (("kv_cache", LATENT), ("kr_cache", ROPE)):
        _check_shapes({name: (given[name], (*pages, 1, width))})
    for name, tensor in given.items():
        kind = torch.bfloat16
        if quantized and name in ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr"):
            kind = torch.int8
        if name.startswith("dequant"):
            kind = torch.float32
        require_dtype(OP, name, tensor, (torch.int64,) if name == "cache_index" else (kind,))
    require_contiguous(OP, **given)


def _check_values(index: torch.Tensor, slots: int, **weights: torch.Tensor) -> None:
    """What only data tells: slots of this cache, none twice; and the weights' storage format."""
    if len(index):
        written = index[index >= 0]
        require(int(index.min()) >= -1, OP, "a slot lies below −1")
        require(not written.numel() or int(written.max()) < slots, OP, f"a slot lies above {slots - 1}")
        require(written.unique().numel() == written.numel(), OP, "a slot comes twice")
    require_format(OP, FRACTAL_NZ, **weights)


def _product(x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor | None) -> torch.Tensor:
    """x · weight: rounded to x's dtype, or of integers by their scales in float32."""
    if x.dtype != torch.int8:
        return x @ weight
    sums = (
        torch._int_mm(x, weight).float() if len(x) else x.new_zeros(0, weight.shape[1], dtype=torch.float32)
    )
    for scale in scales:
        assert scale is not None
        sums = sums * scale
    return sums


def _norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), gamma.float(), epsilon)


@reference("npu::npu_mla_prolog_v3")
def npu_mla_prolog_v3(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    *,
    cache_index: torch.Tensor | None = None,
    dequant_scale_x: torch.Tensor | None = None,
    dequant_scale_w_dq: torch.Tensor | None = None,
    dequant_scale_w_uq_qr: torch.Tensor | None = None,
    dequant_scale_w_dkv_kr: torch.Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    weight_quant_mode: int = PLAIN,
    **others: object,
) -> tuple[torch.Tensor, ...]:
    """Absorbed queries of tokens [T, He], and their latents and rotary parts written to the cache's pages.

    q = norm(x · weight_dq) · weight_uq_qr, of which each head's first 128 elements go through weight_uk [N, 128, 512]
    and the last 64 are rotated as ``npu_interleave_rope`` does; norm of the first 512 columns of x · weight_dkv_kr,
    and its last 64 rotated, go to slot ``cache_index`` of kv_cache [blocks, block, 1, 512] and kr_cache. With
    ``weight_quant_mode`` 2 tokens and those three weights are int8 with scales for each token and each column, and the
    normed query is quantized for each token. Returns (queries [T, N, 512], rotary parts [T, N, 64], three empty ones).
    """
    refuse_arguments(OP, others, _UNUSED)
    if weight_quant_mode not in (PLAIN, ALL_QUANTIZED):
        raise NotImplementedError(f"{OP}: no reference for weight_quant_mode={weight_quant_mode} (only 0, 2)")
    given = {name: value for name, value in locals().items() if torch.is_tensor(value)}
    quantized = weight_quant_mode == ALL_QUANTIZED
    scales = {"dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr"}
    require(cache_index is not None, OP, "cache_mode PA_BSND needs cache_index")
    wanted = scales if quantized else set()
    require(
        scales & given.keys() == wanted, OP, f"quantization mode {weight_quant_mode} takes scales {wanted}"
    )
    _check(given, quantized)
    assert cache_index is not None
    slots = kv_cache.shape[0] * kv_cache.shape[1]
    weights = {"weight_dq": weight_dq, "weight_uq_qr": weight_uq_qr, "weight_dkv_kr": weight_dkv_kr}
    _check_values(cache_index, slots, **weights)

    kind, heads = torch.bfloat16, weight_uk.shape[0]
    low = _product(token_x, weight_dq, dequant_scale_x, dequant_scale_w_dq)
    low = _norm(low, rmsnorm_gamma_cq, rmsnorm_epsilon_cq)
    low, low_scale = quantize_tokens(low) if quantized else (low.to(kind), None)
    query = _product(low, weight_uq_qr, low_scale, dequant_scale_w_uq_qr).unflatten(1, (heads, NOPE + ROPE))
    absorbed = torch.bmm(query[..., :NOPE].to(kind).transpose(0, 1), weight_uk).transpose(0, 1).contiguous()
    rope = turn(query[..., NOPE:], rope_cos[:, None], rope_sin[:, None]).to(kind)

    both = _product(token_x, weight_dkv_kr, dequant_scale_x, dequant_scale_w_dkv_kr)
    latent = _norm(both[:, :LATENT], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv).to(kind)
    key_rope = turn(both[:, LATENT:], rope_cos, rope_sin).to(kind)
    keep = cache_index >= 0
    kv_cache.view(-1, LATENT).index_copy_(0, cache_index[keep], latent[keep])
    kr_cache.view(-1, ROPE).index_copy_(0, cache_index[keep], key_rope[keep])
    empty = rope.new_empty(0, dtype=torch.float32)
    return absorbed, rope, empty, weight_uq_qr.new_empty(0), torch.empty_like(empty)


_UNUSED: dict[str, object] = {
    "quant_scale_ckv": None,
    "quant_scale_ckr": None,
    "smooth_scales_cq": None,
    "actual_seq_len": None,
    "k_nope_clip_alpha": None,
    "cache_mode": "PA_BSND",
    "query_norm_flag": False,
    "kv_cache_quant_mode": 0,
    "query_quant_mode": 0,
    "ckvkr_repo_mode": 0,
    "quant_scale_repo_mode": 0,
    "tile_size": 128,
    "qc_qr_scale": 1.0,
    "kc_scale": 1.0,
    "token_x_dtype": None,
    "weight_dq_dtype": None,
    "weight_uq_qr_dtype": None,
    "weight_dkv_kr_dtype": None,
    "kv_cache_dtype": None,
}
"""Arguments without a reference, and what they are when nobody asks for them."""
