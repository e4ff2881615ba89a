"""`npufleet serve` on what cannot be served: one message, exit code 2, and nothing was started."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npufleet.cluster import cli, device, local
from npufleet.cluster.checkpoint.files import INDEX
from npufleet.cluster.device import Device

from .checkpoints import CONFIGS, W8A8, Entries, entries, safetensors, write

KINDS = ("dense", "experts", "latent", "quantized")
FAMILY = {"dense": "llama", "experts": "qwen3_moe", "latent": "deepseek_v3", "quantized": "llama"}
OUT = "model.layers.2.self_attn.o_proj.weight"
MEMORY = 1 << 20


def config(kind: str) -> dict[str, Any]:
    return {**CONFIGS[FAMILY[kind]], **({"quantization_config": W8A8} if kind == "quantized" else {})}


def whole(kind: str) -> Entries:
    return entries(FAMILY[kind], quantized=kind == "quantized")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    return write(made, config(kind), whole(kind))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four virtual NPUs of 1 MiB, and nothing may start on them."""
    found = Device(kind="virtual", count=4, chip="Ascend910B3", memory=MEMORY)
    monkeypatch.setattr(device, "detect", lambda wanted=None: found)
    monkeypatch.setenv("NPUFLEET_HOME", str(tmp_path / "home"))

    def start(*arguments: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(local, "start", start)


def lose(folder: Path, kind: str) -> None:
    write(folder, config(kind), {name: entry for name, entry in whole(kind).items() if name != OUT})


def reshape(folder: Path, kind: str) -> None:
    dtype, (rows, columns) = whole(kind)[OUT]
    write(folder, config(kind), {**whole(kind), OUT: (dtype, (rows, columns + 1))})


def retype(folder: Path, kind: str) -> None:
    write(folder, config(kind), {**whole(kind), OUT: ("I64", whole(kind)[OUT][1])})


def truncate(folder: Path, kind: str) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_file(folder: Path, kind: str) -> None:
    names = sorted(whole(kind))
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    (folder / "model.safetensors").unlink()
    (folder / "a.safetensors").write_bytes(safetensors({n: whole(kind)[n] for n in parts["a.safetensors"]}))
    listed = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"weight_map": listed}))


BROKEN: dict[str, tuple[Callable[[Path, str], object], str]] = {
    "a tensor is missing": (lose, rf"model.safetensors lacks {OUT}; .* Fetch the checkpoint again"),
    "another shape": (
        reshape,
        rf"{OUT} has the shape \[32, 33\], config.json asks for \[32, 32\]; the two are not of one",
    ),
    "another dtype": (retype, rf"{OUT} is I64; weights are one of F64, F32, .* Convert it anew"),
    "truncated": (truncate, r"its header describes \d+: it is not whole, fetch it again"),
    "a file is missing": (lose_file, rf"lacks b.safetensors, which {INDEX} lists; fetch it again"),
    "no JSON": (lambda f, _: (f / "config.json").write_text("{oops"), r"config.json is not JSON"),
    "no tokenizer": (
        lambda f, _: (f / "tokenizer.json").unlink(),
        r"holds no tokenizer .* or set engine.tok",
    ),
}


def serve(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says on stderr."""
    assert cli.main(["serve", str(folder), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("npufleet: error: ") and said.count("\n") == 1, "one message of one line"
    return said


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_checkpoint(what: str, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, said = BROKEN[what]
    broken(folder, kind)
    found = serve(folder, capsys)
    assert "model 'model'" in found or what == "no JSON"
    assert re.search(said, found), found


def test_heads_that_do_not_divide(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = serve(folder, capsys, "--tensor-parallel", "3")
    assert "tensor_parallel_size is 3, which does not divide its 4 attention heads" in said


def test_more_stages_than_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = serve(folder, capsys, "--set", "engine.pipeline_parallel_size=4")
    assert "pipeline_parallel_size is 4, but it has 3 layers; choose at most 3" in said


def test_expert_parallel(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("--set", "engine.enable_expert_parallel=true", "--set", "engine.data_parallel_size=3")
    said = serve(folder, capsys, *layout)
    if kind in ("dense", "quantized"):
        assert "enable_expert_parallel is set, but the model has no experts; leave it out" in said
    else:
        assert "3 ranks do not divide its 4 experts" in said


def test_too_many_npus(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("--tensor-parallel", "2", "--set", "engine.data_parallel_size=4")
    said = serve(folder, capsys, *layout)
    assert "8 NPUs are asked for (1 x 8 for model), 4 virtual NPUs Ascend910B3 are here; lower" in said


def test_out_of_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = serve(folder, capsys, "--set", f"engine.kv_cache_memory_bytes={MEMORY}")
    assert "out of memory" in said and "lower kv_cache_memory_bytes below" in said
    made = json.loads((folder / "config.json").read_text())
    made = {**made, "vocab_size": 1 << 15}
    tensors = {
        name: (dtype, (1 << 15, 32)) if shape == (64, 32) and "layers" not in name else (dtype, shape)
        for name, (dtype, shape) in whole_of(folder).items()
    }
    write(folder, made, tensors)
    said = serve(folder, capsys, "--set", "engine.kv_cache_memory_bytes=1024")
    assert "out of memory: the weights take" in said and "raise tensor_parallel_size" in said


def whole_of(folder: Path) -> Entries:
    from npufleet.cluster.checkpoint.files import tensors

    return {name: (t.dtype, t.shape) for name, t in tensors(folder / "model.safetensors").items()}
