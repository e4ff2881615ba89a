"""The memory ledger against models that transformers builds, published sizes, and the command that prints it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from npufleet.cluster import cli
from npufleet.cluster.plan.memory import GIB, Limits, capture_sizes, kv_per_token, ledger
from npufleet.cluster.plan.model import ModelShape, from_config
from npufleet.cluster.plan.weights import Layout, weights

PUBLISHED = sorted((Path(__file__).resolve().parents[2] / "benchmarks" / "published").glob("*.json"))
LATENT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 64},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "mlp_only_layers": [1],
    },
    "glm4_moe": {
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 32,
    },
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, "q_lora_rank": 48},
}
"""Small models of each kind; every size may be split by 4."""
WHOLE = (
    "norm",
    "mlp.gate.",
    "q_a_proj",
    "kv_a_proj",
    "o_proj.bias",
    "down_proj.bias",
    "block_sparse_moe.gate",
    "router",
)
"""What tensor parallelism leaves whole on every rank, by its name in transformers."""


def config(kind: str) -> dict[str, Any]:
    common = {
        "model_type": kind,
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    return common | TINY[kind]


def parameters(kind: str) -> dict[str, torch.Size]:
    """Name → shape of what transformers builds, without the memory for it; experts one by one or stacked."""
    given = config(kind)
    made = AutoConfig.for_model(**given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    found = {name: tensor.shape for name, tensor in model.named_parameters()}
    bias = {n: t.shape for n, t in model.named_buffers() if "e_score_correction_bias" in n}
    return found | bias


def split(name: str, shape: torch.Size, kind: str, layout: Layout) -> int:
    """Elements of one tensor on one rank, by the rules of tensor and expert parallelism."""
    if ".experts." in name:
        return shape.numel() // layout.ranks
    if any(part in name for part in WHOLE) or "e_score_correction_bias" in name:
        return shape.numel()
    if "k_proj" in name or "v_proj" in name:
        return shape.numel() // min(layout.tensor, config(kind)["num_key_value_heads"])
    return shape.numel() // layout.tensor


def counted(shape: ModelShape, layout: Layout) -> int:
    return sum(part.elements for part in weights(shape, layout))


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tensor=4),
        Layout(tensor=4, expert_parallel=True),
        Layout(data=4, expert_parallel=True),
    ],
    ids=["one", "tensor", "experts", "replicas"],
)
def test_weights_are_those_of_transformers(kind: str, layout: Layout) -> None:
    shape = from_config(config(kind))
    if layout.expert_parallel and shape.experts is None:
        with pytest.raises(ValueError, match="this one has none"):
            weights(shape, layout)
        return
    expected = sum(split(name, size, kind, layout) for name, size in parameters(kind).items())
    assert counted(shape, layout) == expected


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_published_models_have_their_published_size(file: Path) -> None:
    published = json.loads(file.read_text())
    count = counted(from_config(published["config"]), Layout())
    if published["parameters"] is None:
        announced = {"glm-4.5": 355e9, "glm-4.5-air": 106e9}[file.stem]
        assert abs(count / announced - 1) < 0.01
    else:
        assert count == published["parameters"]


def test_blocks_of_8_bits_are_served_as_16() -> None:
    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert from_config(config("deepseek_v3") | blocks) == from_config(config("deepseek_v3"))


def test_spread_tokens_take_whole_shared_experts() -> None:
    shape = from_config(config("deepseek_v3"))
    spread, split_up = (Layout(tensor=2, data=data, expert_parallel=True) for data in (2, 1))
    sizes = [{p.name: p.elements for p in weights(shape, x)}["shared experts"] for x in (spread, split_up)]
    assert sizes[0] == 2 * sizes[1]


def test_a_token_of_kv_cache() -> None:
    dense = from_config(config("llama"))
    head = dense.hidden // dense.heads
    assert kv_per_token(dense, Layout()) == 3 * 2 * 2 * head * 2
    assert kv_per_token(dense, Layout(tensor=2)) == 3 * 2 * 1 * head * 2
    assert kv_per_token(dense, Layout(tensor=8)) == 3 * 2 * 1 * head * 2  # a key head is repeated, never cut
    latent = from_config(config("deepseek_v3"))
    assert kv_per_token(latent, Layout(tensor=8)) == kv_per_token(latent, Layout()) == 3 * (64 + 16) * 2


@pytest.mark.parametrize(
    ("kind", "layout", "chip", "groups"),
    [
        ("llama", Layout(), "A2", ()),
        ("llama", Layout(tensor=4, data=2), "A2", ("tensor parallel",)),
        ("mixtral", Layout(tensor=2, data=2), "A2", ("tensor parallel", "data parallel")),
        (
            "deepseek_v3",
            Layout(tensor=2, data=2, expert_parallel=True),
            "A2",
            ("tensor parallel", "expert parallel"),
        ),
        ("deepseek_v3", Layout(tensor=8, expert_parallel=True), "A2", ("tensor parallel",)),
        ("deepseek_v3", Layout(tensor=8, expert_parallel=True), "A3", ("tensor parallel", "expert parallel")),
    ],
)
def test_hccl_buffers_of_each_group(kind: str, layout: Layout, chip: str, groups: tuple[str, ...]) -> None:
    found = ledger(from_config(config(kind)), layout, Limits(chip=chip, hccl_buffsize=100))
    assert found.groups == groups
    assert found.hccl == len(groups) * 2 * 100 * (1 << 20)


def test_capture_sizes_are_vllms() -> None:
    assert capture_sizes(Limits(max_num_seqs=16)) == [1, 2, 4, 8, 16, 24, 32]
    assert capture_sizes(Limits())[-1] == 512


@given(st.sampled_from(sorted(TINY)), st.integers(1, 64), st.integers(1, 4096), st.floats(0.1, 1.0))
def test_the_parts_never_exceed_the_budget(kind: str, hbm: int, tokens: int, share: float) -> None:
    limits = Limits(hbm=hbm << 26, max_num_batched_tokens=tokens, gpu_memory_utilization=share)
    found = ledger(from_config(config(kind)), Layout(), limits)
    cache = found.kv_tokens * found.kv_per_token
    assert found.kv_tokens % 128 == 0
    if found.kv_tokens:
        assert found.used + cache <= found.budget < found.used + cache + 128 * found.kv_per_token
    else:
        assert found.budget < found.used + 128 * found.kv_per_token
    assert found.fits == (found.kv_tokens >= 512)


@pytest.mark.parametrize(
    ("kind", "changes", "layout", "message"),
    [
        ("llama", {"model_type": "mamba"}, Layout(), "'mamba'.*llama"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, Layout(), "quantized.*awq"),
        ("llama", {"hidden_size": None}, Layout(), "hidden_size: expected an integer"),
        ("llama", {"torch_dtype": "int8"}, Layout(), "dtype: expected one of bfloat16"),
        ("llama", {}, Layout(tensor=3), "does not divide its 8 attention heads"),
        ("llama", {"num_key_value_heads": 6}, Layout(tensor=4), "neither divides"),
        ("deepseek_v3", {}, Layout(data=3, expert_parallel=True), "3 ranks do not divide its 16 experts"),
        ("mixtral", {}, Layout(data=3), "do not divide an expert's intermediate size 256"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    kind: str, changes: dict[str, Any], layout: Layout, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ledger(from_config(config(kind) | changes), layout)


# The command


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("deepseek_v3")))
    return folder


def test_the_command_prints_the_ledger(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "memory", str(checkpoint), "--tensor-parallel", "2"]) == 0
    text = capsys.readouterr().out
    assert "tiny (deepseek_v3, bfloat16) on 2 × A2" in text
    assert "HCCL, 2 × 200 MB a group: tensor parallel" in text and text.endswith("\nfits\n")


def test_json_adds_up(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "memory", str(checkpoint / "config.json"), "--json", "--hbm", "8"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    parts = [*data["weights"].values(), *data["derived"].values()]
    assert data["used"] == sum(parts) + data["activations"] + data["graphs"] + data["hccl"]["bytes"]
    assert data["budget"] == int(8 * GIB * 0.92)


def test_a_fleet_is_planned_with_its_engine_arguments(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = tmp_path / "fleet.yaml"
    engine = "{tensor_parallel_size: 4, enable_expert_parallel: true, max_num_seqs: 8, enforce_eager: true}"
    fleet.write_text(f"models:\n  - {{name: chat, source: {checkpoint}, engine: {engine}}}\n")
    assert cli.main(["plan", "memory", str(fleet), "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert data["model"] == "chat" and data["graphs"] == 0
    assert data["layout"] == {"tensor": 4, "data": 1, "expert_parallel": True}
    assert data["limits"]["max_num_seqs"] == 8


def test_what_does_not_fit_says_what_would(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "memory", str(checkpoint), "--hbm", "0.01"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    arguments = ["plan", "memory", str(checkpoint), "--max-model-len", str(1 << 29)]
    assert cli.main(arguments) == 1
    assert "lower max_model_len to" in capsys.readouterr().out


def test_what_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "memory", str(tmp_path / "nowhere")]) == 2
    assert "expected a FleetConfig" in capsys.readouterr().err
    assert cli.main(["plan", "memory", str(tmp_path)]) == 2
