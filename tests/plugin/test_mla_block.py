"""The block of latent attention in DeepSeek V3's sizes, without an engine, against transformers' own class.

Two requests are prefilled in one step, then decoded: the steps of decodes alone take one operator up to attention and
read latents that the prefill's operators have written.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLAAttention
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata

from npufleet.kernels.virtual import counters
from npufleet.plugin import register_layers

HIDDEN, HEADS, RANK, LATENT, ROPE, BLOCK = 6144, 4, 1536, 512, 64, 128
PROMPTS, DECODES = (130, 3), 4
FACTOR = 1.5  # as of engines in tests/parity
PROLOG = "npu::npu_mla_prolog_v3"
NPU = torch.device("npu:0")


@pytest.fixture(scope="module")
def config(checkpoint: Callable[..., Path]) -> Iterator[VllmConfig]:
    """The configuration of a layer of these sizes, with a process group of one rank."""
    register_layers()
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    path = checkpoint("mla", **sizes, q_lora_rank=RANK, intermediate_size=64, first_k_dense_replace=2)
    made = EngineArgs(
        model=str(path), skip_tokenizer_init=True, max_model_len=256, dtype="bfloat16"
    ).create_engine_config()
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(made):
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            patch.setenv(name, value)
        init_distributed_environment(1, 0, f"file://{path}/ranks", 0, "hccl")
        ensure_model_parallel_initialized(1, 1)
        yield made
    cleanup_dist_env_and_memory()


class Truth:
    """transformers' attention over whole sequences, in float32 and in bfloat16."""

    def __init__(self, config: DeepseekV3Config, seed: int = 4) -> None:
        random = torch.Generator().manual_seed(seed)
        config._attn_implementation = "eager"
        self.layer, self.rotary = DeepseekV3Attention(config, 0).eval(), DeepseekV3RotaryEmbedding(config)
        with torch.no_grad():
            for name, weight in sorted(self.layer.named_parameters()):
                noise = torch.randn(weight.shape, generator=random)
                scaled = noise * 0.2 + 1 if "norm" in name else noise * (1.6 / weight.shape[-1] ** 0.5)
                weight.copy_(scaled.bfloat16())
        lengths = [count + DECODES for count in PROMPTS]
        self.hidden = [torch.randn(n, HIDDEN, generator=random).bfloat16() for n in lengths]

    @torch.inference_mode()
    def outputs(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """[tokens, hidden] of each request, float32."""
        layer, found = self.layer.to(dtype), []
        for hidden in self.hidden:
            x = hidden.to(dtype)[None]
            places = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1],) * 2, torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
            found.append(layer(x, self.rotary(x, places), mask)[0][0].float())
        return found


class Block:
    """The plugin's layer with the weights of ``truth``, and caches of its own."""

    def __init__(self, config: VllmConfig, truth: Truth) -> None:
        self.config, hf = config, config.model_config.hf_text_config
        with NPU, set_default_torch_dtype(torch.bfloat16):
            self.layer = DeepseekV2MLAAttention(
                config,
                hf,
                HIDDEN,
                HEADS,
                128,
                ROPE,
                128,
                RANK,
                LATENT,
                256,
                config.cache_config,
                None,
                "layer",
            )
            record_metadata_for_reloading(self.layer)
        self.load(truth)
        process_weights_after_loading(self.layer, config.model_config, NPU)
        self.layers = config.compilation_config.static_forward_context
        self.names = sorted(name for name in self.layers if name.startswith("layer"))
        (self.latents, self.ropes) = (
            torch.zeros(6, BLOCK, width, dtype=torch.bfloat16, device=NPU) for width in (LATENT, ROPE)
        )
        self.layers[self.names[0]].kv_cache = self.latents
        self.layers[self.names[1]].bind_kv_cache(self.ropes.unsqueeze(1))

    def load(self, truth: Truth) -> None:
        """Give every parameter to its loader, as vLLM's model does."""
        joined = {"q_a_proj": 0, "kv_a_proj_with_mqa": 1}
        parameters = dict(self.layer.named_parameters())
        for name, weight in truth.layer.state_dict().items():
            module = name.removesuffix(".weight")
            parameter = parameters["fused_qkv_a_proj.weight" if module in joined else name]
            shard = [joined[module]] if module in joined else []
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, weight.bfloat16(), *shard)

    def step(self, hidden: list[torch.Tensor], computed: list[int]) -> list[torch.Tensor]:
        """One step of both requests, whose blocks are 1, 2 and 3, 4; the outputs of each, float32."""
        counts = [len(x) for x in hidden]
        table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
        places = torch.cat([torch.arange(n) + done for n, done in zip(counts, computed, strict=True)])
        owner = torch.tensor([0, 1]).repeat_interleave(torch.tensor(counts))
        slots = table[owner, places // BLOCK].long() * BLOCK + places % BLOCK
        ends, lens = torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(counts) + torch.tensor(computed)
        common = CommonAttentionMetadata(
            query_start_loc=ends.to(NPU),
            query_start_loc_cpu=ends,
            seq_lens=lens.int().to(NPU),
            seq_lens_cpu_upper_bound=lens.int(),
            num_reqs=2,
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=int(lens.max()),
            block_table_tensor=table.to(NPU),
            slot_mapping=slots.to(NPU),
        )
        made: dict[str, Any] = {}
        for name in self.names:
            attention = self.layers[name]
            backend = attention.get_attn_backend()
            spec = backend.customize_spec(attention.get_kv_cache_spec(self.config))
            made[name] = backend.get_builder_cls()(spec, [name], self.config, NPU).build(0, common)
        with torch.inference_mode(), set_forward_context(made, self.config, num_tokens=sum(counts)):
            out = self.layer(places.to(NPU), torch.cat(hidden).to(NPU), None)
        return [x.float() for x in out.cpu().split(counts)]

    def run(self, hidden: list[torch.Tensor]) -> list[torch.Tensor]:
        """All tokens: a prefill of each request, then decodes one by one."""
        found = self.step([x[:n] for x, n in zip(hidden, PROMPTS, strict=True)], [0, 0])
        for done in range(DECODES):
            before = [n + done for n in PROMPTS]
            more = self.step([x[n : n + 1] for x, n in zip(hidden, before, strict=True)], before)
            found = [torch.cat(pair) for pair in zip(found, more, strict=True)]
        return found


@pytest.fixture(scope="module")
def truth(config: VllmConfig) -> Truth:
    return Truth(DeepseekV3Config(**config.model_config.hf_text_config.to_dict()))


@pytest.fixture(scope="module")
def block(config: VllmConfig, truth: Truth) -> Block:
    return Block(config, truth)


def assert_as_close_as_bfloat16(found: list[torch.Tensor], truth: Truth) -> None:
    exact, rounded = truth.outputs(torch.float32), truth.outputs(torch.bfloat16)
    for part in (slice(None, -DECODES), slice(-DECODES, None)):
        ours, theirs = (
            torch.cat([(a[part] - b[part]).abs().flatten() for a, b in zip(x, exact, strict=True)])
            for x in (found, rounded)
        )
        assert ours.mean() < FACTOR * theirs.mean() and ours.max() < 2 * FACTOR * theirs.max()
        assert theirs.mean() < 0.02 * torch.cat(exact).abs().mean(), "bfloat16 costs more than was thought"


def test_decodes_by_one_operator(block: Block, truth: Truth) -> None:
    counters.reset()
    found = block.run(truth.hidden)
    ops = counters.read().ops
    assert ops[PROLOG] == DECODES and ops["npu::npu_kv_rmsnorm_rope_cache"] == 1
    assert_as_close_as_bfloat16(found, truth)


def test_weights_that_are_loaded_again_keep_their_memory(block: Block, config: VllmConfig) -> None:
    """A captured graph reads them where they were; the operator still finds them in its format."""
    other = Truth(DeepseekV3Config(**config.model_config.hf_text_config.to_dict()), seed=8)
    before = {name: weight.data_ptr() for name, weight in block.layer.named_parameters()}
    assert "fused_qkv_a_proj.second_weight" in before
    with NPU, set_default_torch_dtype(torch.bfloat16):
        initialize_layerwise_reload(block.layer)
        block.load(other)
        finalize_layerwise_reload(block.layer, config.model_config)
    assert {name: weight.data_ptr() for name, weight in block.layer.named_parameters()} == before
    assert_as_close_as_bfloat16(block.run(other.hidden), other)
