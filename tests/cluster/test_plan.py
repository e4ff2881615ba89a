"""The memory ledger against models that transformers builds, published sizes, and the command that prints it."""

import json
from dataclasses import replace
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
from npufleet.cluster.plan.shared import SharedExperts, of_engine
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


def of_shared(layout: Layout) -> tuple[int, int]:
    """Elements of shared and of routed experts on a rank of a tiny DeepSeek V3."""
    parts = {part.name: part.elements for part in weights(from_config(config("deepseek_v3")), layout)}
    return parts.get("shared experts", 0), parts.get("experts", 0)


def test_shared_experts_lie_where_they_are_asked_for() -> None:
    whole, split_up = (SharedExperts(placement=name) for name in ("replicated", "tensor-parallel"))
    four = Layout(tensor=2, data=2, expert_parallel=True)
    full = of_shared(four)[0]
    assert of_shared(replace(four, shared=split_up))[0] == full // 2
    assert of_shared(replace(four, data=1))[0] == full // 2
    assert of_shared(replace(four, data=1, shared=whole))[0] == full
    alone = replace(four, shared=SharedExperts(ranks=2))
    routed = of_shared(four)[1]
    assert of_shared(alone) == (0, 2 * routed)
    assert of_shared(replace(alone, on_shared_rank=True)) == (full, 0)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"shared_experts": "everywhere"},
            "shared_experts: expected one of auto, replicated, tensor-parallel",
        ),
        ({"shared_expert_ranks": -1}, "shared_expert_ranks: expected an integer from 0"),
        ({"shared_experts_overlap": 1}, "shared_experts_overlap: expected true or false"),
    ],
)
def test_a_wrong_placement_is_refused(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_engine({"additional_config": engine}, "engine")


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


@pytest.mark.parametrize(
    ("layout", "chip", "hidden", "opened"),
    [
        (Layout(tensor=2, data=4, expert_parallel=True), "A3", 1024, True),
        (
            Layout(tensor=2, data=4, expert_parallel=True),
            "A3",
            512,
            False,
        ),  # the operators take 1024 and more
        (
            Layout(tensor=8, expert_parallel=True),
            "A3",
            1024,
            True,
        ),  # twice the choices are not more than the ranks
        (Layout(tensor=4, expert_parallel=True), "A3", 1024, False),
        (Layout(tensor=2, data=8, expert_parallel=True), "A2", 128, True),
        (Layout(tensor=2, data=4, expert_parallel=True), "A2", 128, False),  # inside a node
        (Layout(tensor=2, data=8), "A2", 128, False),
    ],
)
def test_the_group_of_dispatch_and_combine(layout: Layout, chip: str, hidden: int, opened: bool) -> None:
    shape = from_config(config("deepseek_v3") | {"hidden_size": hidden, "head_dim": 16})
    found = ledger(shape, layout, Limits(chip=chip, hccl_buffsize=100))
    assert ("dispatch and combine" in found.groups) == opened
    assert found.hccl == len(found.groups) * 2 * 100 * (1 << 20)
    assert found.graphs >= ledger(shape, layout, Limits(chip=chip, max_num_seqs=8)).graphs


@pytest.mark.parametrize(
    ("kind", "layout"), [("deepseek_v3", Layout(tensor=4, context=4)), ("llama", Layout(tensor=8, context=2))]
)
def test_ranks_that_share_a_sequence_hold_more_of_them(kind: str, layout: Layout) -> None:
    shape = from_config(config(kind) | {"num_attention_heads": 16})
    limits = Limits(hbm=GIB, hccl_buffsize=50)
    spread, whole = ledger(shape, layout, limits), ledger(shape, replace(layout, context=1), limits)
    assert spread.kv_per_token == whole.kv_per_token and spread.weights == whole.weights
    assert spread.hccl - whole.hccl == 2 * 50 * (1 << 20)
    assert set(spread.groups) - set(whole.groups) == {"decode context parallel"}
    assert spread.activations >= whole.activations and spread.graphs >= whole.graphs
    blocks = (spread.budget - spread.used) // (spread.kv_per_token * 128)
    assert spread.kv_tokens == blocks * 128 * layout.context > whole.kv_tokens


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
        ("mixtral", {}, Layout(tensor=2, shared=SharedExperts(placement="replicated")), "this one has none"),
        ("deepseek_v3", {}, Layout(tensor=2, shared=SharedExperts(ranks=1)), "need expert parallelism"),
        (
            "deepseek_v3",
            {},
            Layout(tensor=4, expert_parallel=True, shared=SharedExperts(ranks=1)),
            "3 ranks for routed experts do not divide its 16 experts",
        ),
        (
            "deepseek_v3",
            {},
            Layout(tensor=2, expert_parallel=True, shared=SharedExperts(ranks=2)),
            "leave none of 2",
        ),
        ("mixtral", {}, Layout(data=3), "do not divide an expert's intermediate size 256"),
        (
            "deepseek_v3",
            {},
            Layout(tensor=4, context=3),
            "context_parallel_size 3 does not divide tensor_parallel",
        ),
        ("llama", {}, Layout(tensor=2, context=2), "context_parallel_size 2 does not divide the 1 ranks"),
        ("llama", {"num_key_value_heads": 1}, Layout(tensor=6, context=4), "tensor_parallel_size 6"),
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
    assert data["layout"] == {
        "tensor": 4,
        "data": 1,
        "expert_parallel": True,
        "pipeline": 1,
        "stage": 0,
        "shared": {"placement": "auto", "ranks": 0, "overlap": False},
        "on_shared_rank": False,
        "context": 1,
    }
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


# Stages


@pytest.mark.parametrize(("layers", "stages"), [(3, 2), (61, 4), (8, 3), (5, 5), (80, 1)])
def test_stages_have_the_layers_that_vllm_gives_them(layers: int, stages: int) -> None:
    from vllm.distributed.utils import get_pp_indices

    shape = from_config(config("llama") | {"num_hidden_layers": layers})
    for stage in range(stages):
        own = Layout(pipeline=stages, stage=stage).layers(shape)
        assert (own.start, own.stop) == get_pp_indices(layers, stage, stages)


@pytest.mark.parametrize("kind", TINY)
def test_stages_together_are_the_model(kind: str) -> None:
    shape = from_config(config(kind))
    stages = [Layout(pipeline=3, stage=stage) for stage in range(3)]
    twice = shape.vocabulary * shape.hidden if shape.tied else 0  # the first and the last need the table
    assert sum(counted(shape, stage) for stage in stages) == counted(shape, Layout()) + twice
    assert sum(kv_per_token(shape, stage) for stage in stages) == kv_per_token(shape, Layout())


def test_the_fullest_stage_is_shown(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "memory", str(checkpoint), "--pipeline-parallel", "2"]) == 0
    text = capsys.readouterr().out
    assert "on 2 × A2: tensor parallel 1, data parallel 1, 2 stages" in text
    assert "one NPU of stage 0, the fullest" in text and "a group: pipeline parallel" in text
    assert cli.main(["plan", "memory", str(checkpoint), "--pipeline-parallel", "4"]) == 2
    assert "pipeline_parallel_size 4 is more than its 3 layers" in capsys.readouterr().err


# Quantized weights

LINEAR_GROUP = {"targets": ["Linear"]}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
DYNAMIC = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}


def compressed(*ignore: str, **group: Any) -> dict[str, Any]:
    groups = {"group_0": {**LINEAR_GROUP, **group}}
    details = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": list(ignore)}
    return {"quantization_config": details}


def by_name(shape: ModelShape, layout: Layout = Layout()) -> dict[str, int]:  # noqa: B008 - frozen
    return {part.name: part.bytes for part in weights(shape, layout)}


def test_int8_weights_take_a_byte_and_a_scale_for_each_channel() -> None:
    plain = from_config(config("llama"))
    quantized = from_config(config("llama") | compressed(weights=INT8, input_activations=DYNAMIC))
    sizes = by_name(quantized)
    assert counted(quantized, Layout()) == counted(plain, Layout())
    matrices, channels, biases = 3 * 128 * 256, 2 * 256 + 128, 2 * 256 + 128
    assert sizes["feed-forward"] == 3 * (matrices + channels * 4 + biases * 2)
    for name in ("embedding", "norms", "output"):
        assert sizes[name] == by_name(plain)[name]


def test_static_inputs_add_two_numbers_for_each_channel() -> None:
    static = DYNAMIC | {"dynamic": False, "strategy": "tensor"}
    made = [
        by_name(from_config(config("qwen2") | compressed(weights=INT8, input_activations=inputs)))
        for inputs in (DYNAMIC, static)
    ]
    assert made[1]["feed-forward"] - made[0]["feed-forward"] == 3 * (2 * 256 + 128) * 8


@pytest.mark.parametrize(("symmetric", "scales"), [(True, 1), (False, 2)])
def test_int4_weights_take_half_a_byte_and_a_scale_for_each_group(symmetric: bool, scales: int) -> None:
    grouped = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": symmetric,
    }
    sizes = by_name(from_config(config("qwen2") | compressed(weights=grouped, input_activations=None)))
    elements = 3 * 128 * 256
    assert sizes["feed-forward"] == 3 * (elements // 2 + elements // 32 * 2 * scales)


def test_what_is_ignored_stays_as_it_was() -> None:
    ignored = ("re:.*self_attn.*", "model.layers.1.mlp.down_proj")
    quantized = from_config(config("llama") | compressed(*ignored, weights=INT8, input_activations=DYNAMIC))
    whole = from_config(config("llama") | compressed(weights=INT8, input_activations=DYNAMIC))
    plain = by_name(from_config(config("llama")))
    assert by_name(quantized)["attention"] == plain["attention"]
    down = 128 * 256
    assert by_name(quantized)["feed-forward"] - by_name(whole)["feed-forward"] == down * 2 - (down + 128 * 4)


def test_experts_have_scales_in_the_models_dtype() -> None:
    quantized = from_config(
        config("qwen3_moe") | compressed("re:.*mlp.gate$", weights=INT8, input_activations=DYNAMIC)
    )
    layout = Layout(tensor=4, expert_parallel=True)
    one = 3 * 128 * 64 + (2 * 64 + 128) * 2
    assert by_name(quantized, layout)["experts"] == 2 * 16 // 4 * one
    assert by_name(quantized, layout)["gates"] == by_name(from_config(config("qwen3_moe")), layout)["gates"]


def test_modelslim_names_each_tensor() -> None:
    kinds = {
        "model_quant_type": "W8A8",
        **{f"model.layers.{n}.mlp.{p}_proj.weight": "W8A8_DYNAMIC" for n in range(3) for p in ("gate", "up")},
        **{f"model.layers.{n}.mlp.down_proj.weight": "FLOAT" for n in range(3)},
    }
    sizes = by_name(from_config(config("qwen2"), description=kinds))
    assert sizes["feed-forward"] == 3 * (2 * (128 * 256 + 256 * 4) + 128 * 256 * 2)
    assert sizes["attention"] == by_name(from_config(config("qwen2")))["attention"]


def test_deepseek_v3_in_int8_takes_half() -> None:
    file = next(file for file in PUBLISHED if file.stem == "deepseek-v3")
    published = json.loads(file.read_text())["config"] | {"torch_dtype": "bfloat16"}
    quantized = compressed("lm_head", "re:.*mlp.gate$", weights=INT8, input_activations=DYNAMIC)
    layout = Layout(tensor=4, data=8, expert_parallel=True)
    whole, half = (ledger(from_config(published | x), layout, Limits(chip="A3")) for x in ({}, quantized))
    sizes = [{part.name: part.bytes for part in found.weights} for found in (whole, half)]
    assert 0.50 < sizes[1]["experts"] / sizes[0]["experts"] < 0.502
    assert half.activations > whole.activations  # the 8-bit copies of inputs


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "llama",
            compressed(weights=INT8 | {"type": "float"}, input_activations=DYNAMIC),
            r"8 bits \(float\) with 8-bit inputs are not served",
        ),
        ("mixtral", compressed(weights=INT8 | {"num_bits": 4}), "experts are quantized as W4A16"),
        ("llama", {"quantization_config": {"quant_method": "compressed-tensors"}}, "no config_groups"),
    ],
)
def test_formats_that_are_not_served_are_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ledger(from_config(config(kind) | changes), Layout())


def test_the_command_reads_modelslims_file(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {f"model.layers.0.self_attn.{name}.weight": "W8A8" for name in ("q_a_proj", "o_proj")}
    (checkpoint / "quant_model_description.json").write_text(json.dumps(kinds))
    assert cli.main(["plan", "memory", str(checkpoint)]) == 0
    assert "tiny (deepseek_v3, ModelSlim, bfloat16) on 1 × A2" in capsys.readouterr().out


def test_a_model_whose_layers_are_all_dense_has_no_experts() -> None:
    found = from_config(config("deepseek_v2") | {"first_k_dense_replace": 3, "num_experts_per_tok": None})
    assert found.experts is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{shared_experts: replicated}", "experts spread over 4 ranks, shared ones replicated"),
        ("{shared_expert_ranks: 2}", "experts spread over 2 ranks, shared ones on 2 of their own"),
    ],
)
def test_the_command_says_where_shared_experts_lie(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    fleet = tmp_path / "fleet.yaml"
    engine = f"{{tensor_parallel_size: 4, enable_expert_parallel: true, additional_config: {options}}}"
    fleet.write_text(f"models:\n  - {{name: chat, source: {checkpoint}, engine: {engine}}}\n")
    assert cli.main(["plan", "memory", str(fleet)]) == 0
    assert said in capsys.readouterr().out
