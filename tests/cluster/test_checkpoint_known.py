"""Checkpoints of the known families: what is missing, has another shape or dtype, or cannot be split."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from npufleet.cluster import checkpoint
from npufleet.cluster.checkpoint import memory
from npufleet.cluster.checkpoint.files import INDEX

from .checkpoints import CONFIGS, W8A8, Entries, entries, safetensors, write

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "w8a8"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_whole_checkpoint_is_fine(kind: str, quantized: bool, tmp_path: Path) -> None:
    config = {**CONFIGS[kind], **({"quantization_config": W8A8} if quantized else {})}
    write(tmp_path, config, entries(kind, quantized=quantized))
    assert checkpoint.check("m", tmp_path, {}) == []


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_expected_is_what_transformers_saves(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**CONFIGS[kind])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert checkpoint.check("m", tmp_path, {}) == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(sorted(CONFIGS)), quantized=st.booleans(), data=st.data())
def test_any_tensor_is_missed(kind: str, quantized: bool, data: st.DataObject, tmp_path: Path) -> None:
    found = entries(kind, quantized=quantized)
    lost = data.draw(st.sampled_from(sorted(found)))
    del found[lost]
    config = {**CONFIGS[kind], **({"quantization_config": W8A8} if quantized else {})}
    write(tmp_path, config, found)
    with pytest.raises(ValueError) as caught:
        checkpoint.check("m", tmp_path, {})
    module = lost.rpartition(".")[0]
    assert module in str(caught.value) and "convert it anew" in str(caught.value)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(sorted(CONFIGS)), data=st.data())
def test_any_wrong_shape_is_seen(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    found = entries(kind)
    name = data.draw(st.sampled_from(sorted(found)))
    dtype, shape = found[name]
    found[name] = (dtype, (shape[0] - 1, *shape[1:]))
    write(tmp_path, CONFIGS[kind], found)
    with pytest.raises(ValueError, match="asks for") as caught:
        checkpoint.check("m", tmp_path, {})
    assert name in str(caught.value) and str(list(shape)) in str(caught.value)


def change(kind: str, name: str, dtype: str) -> Entries:
    found = entries(kind)
    assert name in found
    return {**found, name: (dtype, found[name][1])}


def test_a_missing_layer_is_named(tmp_path: Path) -> None:
    found = {name: entry for name, entry in entries("llama").items() if ".layers.2." not in name}
    write(tmp_path, CONFIGS["llama"], found)
    said = r"model.safetensors lacks model.layers.2.input_layernorm.weight, .* and 6 more; the model"
    with pytest.raises(ValueError, match=said):
        checkpoint.check("m", tmp_path, {})


def test_the_index_is_named_when_it_does_not_list_a_tensor(tmp_path: Path) -> None:
    found = entries("llama")
    del found[DOWN]
    write(tmp_path, CONFIGS["llama"], found)
    names = sorted(found)
    half = {name: found[name] for name in names[: len(names) // 2]}
    rest = {name: found[name] for name in names[len(names) // 2 :]}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "a.safetensors").write_bytes(safetensors(half))
    (tmp_path / "b.safetensors").write_bytes(safetensors(rest))
    listed = {**dict.fromkeys(half, "a.safetensors"), **dict.fromkeys(rest, "b.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": listed}))
    said = rf"none of its 2 files \(a.safetensors …\) holds {DOWN}, and {INDEX} does not list it"
    with pytest.raises(ValueError, match=said):
        checkpoint.check("m", tmp_path, {})


def test_a_part_that_counts_itself_is_missed_without_an_index(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["llama"], {})
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(safetensors(entries("llama")))
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00002.safetensors, one of the 2 parts"):
        checkpoint.check("m", tmp_path, {})


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        ("I8", "is I8, but config.json has no quantization_config and there is no quant_model_description"),
        ("F8_E4M3", "is F8_E4M3, but config.json has no quantization_config"),
        ("I32", "is I32; weights are one of F64, F32"),
        ("BOOL", "is BOOL; weights are one of F64, F32"),
    ],
)
def test_a_dtype_that_cannot_be_right_is_named(dtype: str, said: str, tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["llama"], change("llama", DOWN, dtype))
    with pytest.raises(ValueError, match=said):
        checkpoint.check("m", tmp_path, {})


def test_a_float_weight_beside_a_scale_is_named(tmp_path: Path) -> None:
    found = entries("llama", quantized=True)
    found[DOWN] = ("BF16", found[DOWN][1])
    write(tmp_path, {**CONFIGS["llama"], "quantization_config": W8A8}, found)
    with pytest.raises(ValueError, match="is BF16, but has a scale of a quantized weight beside it"):
        checkpoint.check("m", tmp_path, {})


def test_a_layer_that_is_left_unquantized_is_fine(tmp_path: Path) -> None:
    found = entries("llama", quantized=True)
    found[DOWN] = ("BF16", found[DOWN][1])
    del found["model.layers.1.mlp.down_proj.weight_scale"]
    write(tmp_path, {**CONFIGS["llama"], "quantization_config": W8A8}, found)
    assert checkpoint.check("m", tmp_path, {}) == []


def test_what_modelslim_describes_must_be_there(tmp_path: Path) -> None:
    found = entries("llama", quantized=True)
    write(tmp_path, CONFIGS["llama"], found)
    kinds = {name: "W8A8" if dtype == "I8" else "FLOAT" for name, (dtype, _) in found.items()}
    kinds["model.layers.0.self_attn.q_proj.input_scale"] = "W8A8"
    (tmp_path / "quant_model_description.json").write_text(json.dumps(kinds))
    with pytest.raises(ValueError, match=r"q_proj\.input_scale, which quant_model_description\.json lists"):
        checkpoint.check("m", tmp_path, {})


@pytest.mark.parametrize(
    ("kind", "engine", "said"),
    [
        ("llama", {"tensor_parallel_size": 3}, "does not divide its 4 attention heads; possible are 1, 2, 4"),
        ("llama", {"enable_expert_parallel": True}, "the model has no experts; leave it out"),
        ("llama", {"pipeline_parallel_size": 4}, "it has 3 layers; choose at most 3"),
        (
            "qwen3_moe",
            {"data_parallel_size": 3, "enable_expert_parallel": True},
            "3 ranks do not divide its 4 experts",
        ),
        ("mixtral", {"data_parallel_size": 5}, "do not divide an expert's intermediate size 48"),
    ],
)
def test_layouts_that_cannot_be_are_refused(
    kind: str, engine: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write(tmp_path, CONFIGS[kind], entries(kind))
    with pytest.raises(ValueError, match=said):
        checkpoint.check("m", tmp_path, engine)


def test_what_cannot_lie_in_memory_is_said_before_the_start(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["llama"], entries("llama"))
    needs = 2 * sum(math.prod(shape) for _, shape in entries("llama").values())
    memory.check("m", tmp_path, {}, 2 * needs)
    with pytest.raises(ValueError, match=r"out of memory: the weights take .* raise tensor_parallel_size"):
        memory.check("m", tmp_path, {}, needs - 1)
    memory.check("m", tmp_path, {"tensor_parallel_size": 2}, needs - 1)
    cache = {"kv_cache_memory_bytes": 2 * needs}
    with pytest.raises(ValueError, match=r"and the KV cache .*; lower kv_cache_memory_bytes below"):
        memory.check("m", tmp_path, cache, 2 * needs)


def test_files_of_an_unknown_family_are_weighed(tmp_path: Path) -> None:
    write(tmp_path, {**CONFIGS["llama"], "model_type": "other"}, entries("llama"))
    with pytest.raises(ValueError, match="out of memory"):
        memory.check("m", tmp_path, {}, 1 << 10)
    memory.check("m", tmp_path, {}, 1 << 30)
