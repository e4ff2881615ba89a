"""Tiny checkpoints for `npufleet serve`, with a tokenizer."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.tokenizer import make_tokenizer_dir
from tests.parity.checkpoints import BY_NAME, write

SETTINGS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 48,
}
"""Engine arguments that keep them small."""


def checkpoint(name: str, folder: Path) -> Path:
    """Write one of the parity tests' checkpoints, as it can be served."""
    path = write(BY_NAME[name], folder)
    tokenizer = make_tokenizer_dir(folder / "tokenizer")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_bytes((tokenizer / file).read_bytes())
    return path


def flags(**settings: object) -> tuple[str, ...]:
    """Engine arguments as the command line takes them."""
    return tuple(f"--set=engine.{name}={value}" for name, value in {**SETTINGS, **settings}.items())
