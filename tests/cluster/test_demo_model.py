"""The demo model: finding the GGUF file, converting it, putting the checkpoint in place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from npufleet.cluster import demo_model

KNOWN_TOKENS = {"What is the capital of France?": [1780, 314, 260, 3575, 282, 4649, 47]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    seen: list[tuple[int, int]] = []
    demo_model.convert(demo_model.find_gguf(), folder, lambda done, total: seen.append((done, total)))
    assert seen[0] == (1, 272)
    assert seen[-1] == (272, 272)
    return folder


def test_bfloat16_rounds_to_nearest_even_as_torch_does() -> None:
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    values[:6] = [0.0, -0.0, 1.00390625, 1.01171875, 3.0e38, 1e-40]  # ties, large, subnormal
    ours = np.frombuffer(demo_model._to_bfloat16(values), dtype=np.int16)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(ours, theirs)


def test_rotation_order_is_undone() -> None:
    heads, size, hidden = 2, 4, 3
    half = np.arange(heads * size * hidden, dtype=np.float32).reshape(heads * size, hidden)
    interleaved = half.reshape(heads, 2, size // 2, hidden).swapaxes(1, 2).reshape(half.shape)
    np.testing.assert_array_equal(demo_model._to_half_rotation(interleaved, heads), half)


@pytest.mark.parametrize("name", ["blk.0.mystery.weight", "blk.0.attn_q", "mystery"])
def test_an_unknown_tensor_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="has no place in a Llama checkpoint"):
        demo_model._huggingface_name(name)


def test_the_checkpoint_is_what_transformers_expects(checkpoint: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(checkpoint)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_word_embeddings
    with safe_open(checkpoint / "model.safetensors", framework="pt") as weights:
        assert len(weights.keys()) == 272
        query = weights.get_tensor("model.layers.29.self_attn.q_proj.weight")
    assert (query.shape, query.dtype) == ((576, 576), torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for text, ids in KNOWN_TOKENS.items():
        assert tokenizer.encode(text) == ids
    for text in ("Hello  world 2024!\n\tdef f(x):", "naïve 你好 🙂", " leading"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == 2


def fake_convert(source: Path, target: Path, progress: object) -> None:
    (target / "config.json").write_text("{}")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NPUFLEET_HOME", str(tmp_path))
    return tmp_path


def test_it_is_made_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "convert", fake_convert)
    assert not demo_model.is_ready()
    folder = demo_model.ensure()
    assert folder == home / "models" / demo_model.NAME
    assert demo_model.is_ready()
    monkeypatch.setattr(demo_model, "convert", lambda *given: pytest.fail("made again"))
    assert demo_model.ensure() == folder
    assert [path.name for path in folder.parent.iterdir()] == [demo_model.NAME]


def test_another_version_of_the_conversion_replaces_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "convert", fake_convert)
    folder = demo_model.ensure()
    (folder / "npufleet.json").write_text(json.dumps({"conversion": -1}))
    (folder / "old").touch()
    demo_model.ensure()
    assert demo_model.is_ready()
    assert not (folder / "old").exists()


def test_a_broken_conversion_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: Path, target: Path, progress: object) -> None:
        (target / "half").touch()
        raise ValueError("no")

    monkeypatch.setattr(demo_model, "convert", broken)
    with pytest.raises(ValueError, match="no"):
        demo_model.ensure()
    assert not demo_model.is_ready()
    assert list((home / "models").iterdir()) == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "PACKAGE", "no_such_package_here")
    with pytest.raises(ValueError, match="pip install"):
        demo_model.find_gguf()
