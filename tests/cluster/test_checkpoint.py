"""Broken checkpoints, as they are seen before anything starts."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npufleet.cluster import checkpoint
from npufleet.cluster.checkpoint import files, siblings
from npufleet.cluster.checkpoint.files import Stored


def safetensors(*names: str, size: int = 4) -> bytes:
    """A file with tensors of ``size`` bytes each."""
    entries = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size * len(names))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A whole checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 9}))
    (tmp_path / "model.safetensors").write_bytes(safetensors("a", "b"))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_a_whole_one_is_fine(source: Path) -> None:
    assert checkpoint.check("m", source, {"tensor_parallel_size": 3}) == []
    whole = Stored(shape=(4,), dtype="U8", file="model.safetensors")
    assert files.tensors(source / "model.safetensors") == {"a": whole, "b": whole}


def shards(source: Path, **files: bytes) -> None:
    (source / "model.safetensors").unlink()
    for name, content in files.items():
        (source / f"{name}.safetensors").write_bytes(content)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (source / checkpoint.INDEX).write_text(json.dumps(index))


def cut(source: Path, size: int) -> None:
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])


Break = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda s: (s / "config.json").unlink(), "expected a folder with a Hugging Face checkpoint"),
        (lambda s: (s / "config.json").write_text("{no"), r"config.json is not JSON: Expecting"),
        (
            lambda s: (s / "config.json").write_text("[1]"),
            r"config.json holds a list; expected a JSON object",
        ),
        (lambda s: cut(s, -1), r"model.safetensors has \d+ bytes, its header describes \d+: it is not whole"),
        (lambda s: cut(s, 50), "model.safetensors has 50 bytes and no safetensors header"),
        (lambda s: cut(s, 0), "model.safetensors has 0 bytes and no safetensors header"),
        (lambda s: (s / "model.safetensors").write_bytes(b"<html>not found</html>"), "no safetensors header"),
        (lambda s: (s / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"), "not of safetensors"),
        (lambda s: (s / "model.safetensors").unlink(), "holds no weights"),
        (lambda s: (s / "tokenizer.json").unlink(), "holds no tokenizer"),
        (lambda s: (s / "tokenizer.json").write_text("{} x"), "tokenizer.json is not JSON: Extra data"),
        (
            lambda s: shards(s, one=safetensors("a")),
            "lacks two.safetensors, which model.safetensors.index.json",
        ),
        (lambda s: shards(s, one=safetensors("a"), two=b""), "two.safetensors has 0 bytes"),
        (lambda s: shards(s, one=safetensors("a"), two=safetensors("c")), "lacks the tensor 'b'"),
    ],
)
def test_what_is_broken_is_named(source: Path, broken: Break, said: str) -> None:
    broken(source)
    with pytest.raises(ValueError, match=said) as caught:
        checkpoint.check("m", source, {})
    assert str(caught.value).startswith("model 'm': ")


def test_a_split_that_vllm_refuses_is_said_with_those_that_it_takes(source: Path) -> None:
    said = "tensor_parallel_size is 2, which does not divide its 9 attention heads; possible are 1, 3, 9"
    with pytest.raises(ValueError, match=said):
        checkpoint.check("m", source, {"tensor_parallel_size": 2})
    (source / "config.json").write_text(json.dumps({"text_config": {"num_attention_heads": 4}}))
    assert checkpoint.check("m", source, {"tensor_parallel_size": 2}) == []


def test_what_the_user_brings_from_elsewhere_is_not_asked_for(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / "model.safetensors").unlink()
    assert checkpoint.check("m", source, {"tokenizer": "/t", "load_format": "dummy"}) == []


MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def stored(*shape: int, dtype: str = "BF16") -> Stored:
    return Stored(shape=shape, dtype=dtype, file="model.safetensors")


def layers(count: int) -> dict[str, Stored]:
    return {f"model.layers.{layer}.mlp.{leaf}": stored(8, 4) for layer in range(count) for leaf in MLP}


def test_a_gap_in_an_inner_layer_is_an_error_and_at_the_ends_a_doubt() -> None:
    assert siblings.findings(layers(4)) == []
    for number, sure in ((0, False), (2, True), (3, False)):
        lost = f"model.layers.{number}.mlp.down_proj.weight"
        (found,) = siblings.findings({name: t for name, t in layers(4).items() if name != lost})
        assert found.text == f"the weights lack {lost}, which the layers like it have"
        assert found.sure is sure


def test_an_odd_shape_is_a_doubt() -> None:
    odd = "model.layers.2.mlp.down_proj.weight"
    (found,) = siblings.findings({**layers(4), odd: stored(8, 3)})
    assert found.text == f"{odd} has the shape [8, 3], in all other layers it is [8, 4]"
    assert not found.sure


def test_layers_of_several_kinds_are_not_odd() -> None:
    dense = {f"model.layers.{layer}.mlp.up_proj.weight": stored(8, 4) for layer in (0, 1)}
    experts = {f"model.layers.{layer}.mlp.gate.weight": stored(8, 4) for layer in (2, 3, 4)}
    extra = {"model.layers.5.mlp.gate.weight": stored(8, 4), "model.layers.5.enorm.weight": stored(4)}
    mixed = {f"model.layers.{layer}.attn.q.weight": stored(8 if layer % 2 else 16, 4) for layer in range(6)}
    assert siblings.findings({**dense, **experts, **extra, **mixed}) == []
