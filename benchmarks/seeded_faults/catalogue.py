"""The faults: what people get wrong when they write such a plugin."""

from __future__ import annotations

from dataclasses import dataclass

KERNELS = "tests/kernels/"
PLUGIN = "tests/plugin/"
GREEDY = "tests/parity/test_parity_greedy.py -k llama-"
RANKS = "tests/parity/test_parity_tensor_parallel.py"
LATENT = "tests/parity/test_parity_mla.py -k deepseek-v2-"
BETWEEN = "tests/virtual/test_hccl_experts.py -k tokens"
EXPERTS = "tests/parity/test_parity_moe.py -k mixtral"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``old`` becomes ``new`` in ``file``; ``tests`` are pytest targets in the order in which they run."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why_not: str = ""
    """Why no test can catch it here, for a fault that stays uncaught."""


def _fault(name: str, file: str, old: str, new: str, *tests: str, why_not: str = "") -> Fault:
    return Fault(name=name, file=file, old=old, new=new, tests=tests, why_not=why_not)


_CACHE = (
    _fault(
        "slots of the wrong dtype",
        "kernels/ops/kv_cache.py",
        "value_cache, slots, cache_mode",
        "value_cache, slots.long(), cache_mode",
        f"{KERNELS}test_kv_cache.py",
    ),
    _fault(
        "K and V swapped",
        "kernels/ops/kv_cache.py",
        "key.contiguous(), value.contiguous()",
        "value.contiguous(), key.contiguous()",
        f"{KERNELS}test_kv_cache.py",
    ),
    _fault(
        "values read where keys are",
        "plugin/attention/layout.py",
        "strides, start + half)",
        "strides, start)",
        f"{PLUGIN}test_layout.py",
    ),
    _fault(
        "non-contiguous cache",
        "plugin/attention/layout.py",
        "key_cache=cache.as_strided(heads, strides, start),",
        "key_cache=cache[:, 0].unflatten(-1, (num_kv_heads, -1)),",
        f"{PLUGIN}test_layout.py",
    ),
    _fault(
        "int32 overflow of slots",
        "plugin/attention/layout.py",
        "if pages * block_size > torch.iinfo(torch.int32).max:",
        "if pages < 0:",
        f"{PLUGIN}test_layout.py",
    ),
    _fault(
        "block table off by one",
        "plugin/attention/metadata.py",
        "table = scale_block_table(table, cache.step, self._table_buffer(table))",
        "table = scale_block_table(table, cache.step, self._table_buffer(table)).add_(1)",
        f"{PLUGIN}test_metadata.py",
        GREEDY,
    ),
    _fault(
        "slot in the next block at its end",
        "plugin/triton_kernels.py",
        "positions // (kv_cache_block_size * ranks)]",
        "(positions + 1) // (kv_cache_block_size * ranks)]",
        f"{PLUGIN}test_triton_kernels.py",
    ),
    _fault(
        "padding written to slot 0",
        "plugin/triton_kernels.py",
        ".fill_(pad_id)",
        ".fill_(0)",
        f"{PLUGIN}test_triton_kernels.py",
    ),
    _fault(
        "other pages zeroed",
        "plugin/model_runner.py",
        "pages.index_fill_(0, index, 0)",
        "pages.index_fill_(0, (index + 1) % pages.shape[0], 0)",
        f"{PLUGIN}test_engine.py",
        f"{PLUGIN}test_connector.py",
    ),
)

_LENGTHS = (
    _fault(
        "query lengths not cumulative from the first",
        "plugin/attention/metadata.py",
        "common.query_start_loc_cpu[1 : common.num_reqs + 1]",
        "common.query_start_loc_cpu[: common.num_reqs]",
        f"{PLUGIN}test_metadata.py",
    ),
    _fault(
        "key lengths without the new token",
        "plugin/attention/metadata.py",
        "common.seq_lens_cpu_upper_bound[: common.num_reqs].tolist()",
        "(common.seq_lens_cpu_upper_bound[: common.num_reqs] - 1).tolist()",
        f"{PLUGIN}test_metadata.py",
    ),
    _fault(
        "stale graph lengths",
        "plugin/attention/capture.py",
        "update_all(self._calls, stream, query_ends, kv_lens)",
        "update_all(self._calls, stream, query_ends, [max(n - 1, 1) for n in kv_lens])",
        f"{GREEDY}graph",
    ),
    _fault(
        "graph replayed without its lengths",
        "plugin/graph.py",
        "captured.attention.update(self._update_stream, step.query_ends, step.kv_lens)",
        "pass",
        f"{GREEDY}graph",
    ),
    _fault(
        "gate of a captured call never opened",
        "kernels/ops/attention.py",
        "one.gate.record(stream)",
        "pass",
        f"{KERNELS}test_attention_graph.py",
    ),
    _fault(
        "gate of a captured call never closed",
        "kernels/ops/attention.py",
        "gate.reset(stream)",
        "pass",
        f"{KERNELS}test_attention_graph.py",
    ),
    _fault(
        "missing event wait before an update",
        "plugin/graph.py",
        "self._update_stream.wait_event(captured.replayed)",
        "pass",
        f"{PLUGIN}test_engine.py",
        f"{GREEDY}graph",
    ),
)

_MATHS = (
    _fault(
        "wrong scale",
        "plugin/attention/dense.py",
        "self.scale = float(scale)",
        "self.scale = 0.9 * float(scale)",
        GREEDY,
    ),
    _fault(
        "no causal mask",
        "kernels/ops/attention.py",
        'return {"atten_mask": causal_mask(device), "sparse_mode": CAUSAL}',
        'return {"sparse_mode": NO_MASK}',
        f"{KERNELS}test_attention.py",
    ),
    _fault(
        "window off by one",
        "kernels/ops/attention.py",
        '"pre_tokens": sliding_window - 1,',
        '"pre_tokens": sliding_window,',
        f"{KERNELS}test_attention.py",
    ),
    _fault(
        "interleaved instead of half rope",
        "plugin/layers/rotary.py",
        "            width,\n            self.is_neox_style,\n        )\n        return rotated.view(",
        "            width,\n            not self.is_neox_style,\n        )\n        return rotated.view(",
        f"{PLUGIN}test_layers.py",
    ),
    _fault(
        "rope modes swapped in the call",
        "kernels/ops/rope.py",
        'mode = "half" if is_neox else "interleave"\n        return torch_npu.npu_mrope(\n            positions, query',
        'mode = "interleave" if is_neox else "half"\n        return torch_npu.npu_mrope(\n            positions, query',
        f"{KERNELS}test_rope.py",
    ),
    _fault(
        "rope table in another dtype",
        "plugin/layers/rotary.py",
        "cache, width = self._match_cos_sin_cache_dtype(query), self.rotary_dim",
        "cache, width = self._match_cos_sin_cache_dtype(query).double(), self.rotary_dim",
        f"{PLUGIN}test_layers.py",
    ),
    _fault(
        "residual without the sum",
        "kernels/ops/norm.py",
        "return normed, total",
        "return normed, residual",
        f"{KERNELS}test_norm.py",
    ),
    _fault(
        "epsilon left out",
        "kernels/ops/norm.py",
        "torch_npu.npu_rms_norm(x, weight, eps)",
        "torch_npu.npu_rms_norm(x, weight)",
        f"{KERNELS}test_norm.py",
    ),
    _fault(
        "Gemma's weight without 1",
        "kernels/ops/norm.py",
        "torch_npu.npu_gemma_rms_norm(x.contiguous(), weight, eps)",
        "torch_npu.npu_rms_norm(x.contiguous(), weight, eps)",
        f"{KERNELS}test_norm.py",
    ),
    _fault(
        "gate and value swapped",
        "kernels/ops/activation.py",
        "torch_npu.npu_swiglu(x)",
        "torch_npu.npu_swiglu(x.roll(x.shape[-1] // 2, -1))",
        f"{KERNELS}test_activation.py",
    ),
    _fault(
        "top-k of the wrong dtype",
        "kernels/ops/sampling.py",
        "k = k.to(torch.int32)",
        "k = k.to(torch.int64)",
        f"{KERNELS}test_sampling.py",
    ),
)

_GROUPS = (
    _fault(
        "missing all-reduce",
        "plugin/communicator.py",
        "    def all_gather(self, input_",
        "    def all_reduce(self, input_):\n        return input_\n\n    def all_gather(self, input_",
        RANKS,
    ),
    _fault(
        "all-gather along the wrong dimension",
        "plugin/communicator.py",
        "super().all_gather(input_.contiguous(), dim)",
        "super().all_gather(input_.contiguous(), 0)",
        RANKS,
    ),
    _fault(
        "groups on another rank's device",
        "plugin/worker.py",
        "group.device = self.device",
        "pass",
        f"{PLUGIN}test_worker.py",
    ),
)

_EXPERTS = (
    _fault(
        "wrong expert offset",
        "plugin/moe/experts.py",
        "first = rank * moe.num_local_experts",
        "first = 0 * moe.num_local_experts",
        f"{PLUGIN}test_moe.py",
        f"{PLUGIN}test_moe_communication.py",
        "tests/parity/test_parity_moe.py -k ranks",
    ),
    _fault(
        "probabilities of experts not divided by their sum",
        "kernels/ops/moe.py",
        "        weights = weights / weights.sum(dim=-1, keepdim=True)\n"
        "    return weights, experts\n\n\ndef top_k_grouped",
        "        pass\n    return weights, experts\n\n\ndef top_k_grouped",
        f"{KERNELS}test_moe.py",
    ),
    _fault(
        "groups counted by one expert in spite of a bias",
        "kernels/ops/moe.py",
        "group_select_mode=0 if bias is None else 1",
        "group_select_mode=0",
        f"{KERNELS}test_moe.py",
    ),
    _fault(
        "experts' rows counted cumulatively",
        "kernels/ops/moe.py",
        "expert_tokens_num_type=1,",
        "expert_tokens_num_type=0,",
        f"{KERNELS}test_moe.py",
        EXPERTS,
    ),
    _fault(
        "places of missing experts read",
        "kernels/ops/moe.py",
        "drop_pad_mode=3 if partial else 2",
        "drop_pad_mode=2",
        f"{KERNELS}test_moe.py",
    ),
    _fault(
        "ranks tell each other of their own tokens alone",
        "kernels/ops/moe_distribute.py",
        "global_bs=largest * layout.ranks,\n        expert_token_nums_type",
        "global_bs=x.shape[0] * layout.ranks,\n        expert_token_nums_type",
        BETWEEN,
    ),
    _fault(
        "rows come back without their weights",
        "kernels/ops/moe_distribute.py",
        "dispatched.rank_counts,\n        weights,",
        "dispatched.rank_counts,\n        torch.ones_like(weights),",
        BETWEEN,
    ),
    _fault(
        "experts count what they receive cumulatively",
        "kernels/ops/moe_distribute.py",
        "expert_token_nums_type=1,",
        "expert_token_nums_type=0,",
        BETWEEN,
        f"{PLUGIN}test_moe_communication.py",
    ),
    _fault(
        "padding that chooses one expert again and again",
        "plugin/moe/communication/divided.py",
        "experts = pad_choices(experts,",
        "_ = pad_choices(experts,",
        f"{PLUGIN}test_moe_communication.py",
    ),
    _fault(
        "shared experts' rows added to the first rank's tokens",
        "plugin/moe/communication/base.py",
        "mine = x[rank * own.shape[0] : (rank + 1) * own.shape[0]]",
        "mine = x[: own.shape[0]]",
        f"{PLUGIN}test_shared_experts.py",
    ),
    _fault(
        "float16 divided for a model that does not make up for it",
        "plugin/moe/runner.py",
        'return dtype == torch.float16 and not model_type.startswith("glm4")',
        "return dtype == torch.float16",
        f"{PLUGIN}test_moe_block.py -k glm4",
    ),
    _fault(
        "the routed experts' factor left out of their weights",
        "plugin/moe/runner.py",
        "return weights if factor == 1.0 or self._halved else weights * factor",
        "return weights",
        "tests/parity/test_parity_checkpoints.py -k deepseek-v3-moe",
        "tests/parity/test_parity_mla.py -k deepseek-v3-moe",
    ),
)

_LATENTS = (
    _fault(
        "rotary part of the query not rotated",
        "plugin/layers/mla.py",
        "rope = rotate_query(rope, cos, sin)",
        "rope = rope.contiguous()",
        LATENT,
    ),
    _fault(
        "earlier chunks left out", "plugin/attention/mla.py", "if not prefill.chunks:", "if True:", LATENT
    ),
    _fault(
        "merge without the new tokens' sum",
        "plugin/attention/mla.py",
        "[lse[chunk.tokens], part_lse]",
        "[part_lse, part_lse]",
        LATENT,
    ),
    _fault(
        "heads not padded",
        "plugin/attention/mla.py",
        "return torch.nn.functional.pad(query, (0, 0, 0, missing)) if missing else query.contiguous()",
        "return query.contiguous()",
        f"{PLUGIN}test_mla.py",
        "tests/parity/test_parity_mla.py -k kimi",
    ),
)

_PROLOG = (
    _fault(
        "weights left in ND",
        "kernels/ops/mla_prolog.py",
        "config.allow_internal_format = True",
        "config.allow_internal_format = False",
        f"{KERNELS}test_mla_prolog.py",
    ),
    _fault(
        "sines for cosines",
        "kernels/ops/mla_prolog.py",
        "        sin,\n        cos,\n        latent_cache",
        "        cos,\n        sin,\n        latent_cache",
        f"{KERNELS}test_mla_prolog.py",
    ),
    _fault(
        "scales of the other part",
        "plugin/layers/mla_prolog.py",
        'zip(("weight_scale", "second_scale"), scales, strict=False)',
        'zip(("second_scale", "weight_scale"), scales, strict=False)',
        f"{PLUGIN}test_mla_prolog.py",
    ),
    _fault(
        "one operator for steps with prefills too",
        "plugin/layers/mla.py",
        "step.new is None and llama_4_scaling is None",
        "llama_4_scaling is None",
        f"{PLUGIN}test_mla_block.py",
    ),
    _fault(
        "one operator where ranks share a cache",
        "plugin/layers/mla_prolog.py",
        "if context_ranks > 1:",
        "if context_ranks > 99:",
        f"{PLUGIN}test_mla_prolog.py",
    ),
)

_SPREAD = (
    _fault(
        "partial results of ranks not weighted",
        "plugin/attention/context_parallel.py",
        "share = (lse - total).exp().unsqueeze(-1)",
        "share = torch.full_like(lse, 1 / self.size).unsqueeze(-1)",
        f"{PLUGIN}test_context_parallel.py",
    ),
    _fault(
        "a rank without tokens of a request counted",
        "plugin/attention/context_parallel.py",
        "return lse.masked_fill_(empty.unsqueeze(1), NOTHING)",
        "return lse",
        f"{PLUGIN}test_context_parallel.py",
    ),
    _fault(
        "tokens of other ranks written too",
        "plugin/triton_kernels.py",
        "slots.masked_fill_(offsets // interleave % ranks != total_cp_rank, pad_id)",
        "pass",
        f"{PLUGIN}test_context_parallel.py",
    ),
    _fault(
        "latents of another rank's rows",
        "plugin/attention/mla_metadata.py",
        "first = rank * rows + before",
        "first = before",
        f"{PLUGIN}test_context_parallel.py",
    ),
    _fault(
        "a capture that writes to the cache",
        "plugin/attention/mla_metadata.py",
        "common_attn_metadata.slot_mapping.fill_(-1)",
        "pass",
        "tests/parity/test_parity_context_parallel.py -k v3-graph",
    ),
)

FAULTS = (*_CACHE, *_LENGTHS, *_MATHS, *_GROUPS, *_EXPERTS, *_LATENTS, *_PROLOG, *_SPREAD)
