"""A quick part of the contract report: full-size models of two families without weights, and what it notices."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.engine.arg_utils import EngineArgs

from benchmarks.contract_watch import Watch
from npufleet.cluster.plan.memory import Limits, capture_sizes
from npufleet.kernels.ops.norm import rms_norm

ROOT = Path(__file__).resolve().parents[2]


def test_full_size_models_fit_together() -> None:
    """Shapes, weights, KV cache and groups of Llama 3 8B and DeepSeek V2 Lite, on one NPU and split over several."""
    done = subprocess.run(
        [sys.executable, "benchmarks/contract_cases.py", "A2", "llama-3-8b", "deepseek-v2-lite"],
        cwd=ROOT,
        env=os.environ | {"NPUFLEET_DEVICE": "virtual:8:Ascend910B3", "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    assert [(row["name"], row["layout"]) for row in rows] == [
        ("llama-3-8b", "TP1"),
        ("llama-3-8b", "TP8"),
        ("deepseek-v2-lite", "TP1"),
        ("deepseek-v2-lite", "TP4 EP4"),
        ("deepseek-v2-lite", "TP4 EP4, shared experts replicated"),
    ]
    assert [row["errors"] for row in rows] == [[]] * 5
    called = set().union(*(row["found"]["operators"] for row in rows))
    assert {"npu::npu_fused_infer_attention_score.out", "npu::npu_grouped_matmul"} <= called


@pytest.mark.parametrize(("width", "errors"), [(64, 0), (63, 1)])
def test_a_shape_that_the_meta_kernel_lets_pass_is_noticed(width: int, errors: int) -> None:
    watch = Watch()
    with FakeTensorMode(), watch.measuring():
        x = torch.empty(5, 64, dtype=torch.bfloat16, device="npu:0")
        rms_norm(x, torch.empty(width, dtype=torch.bfloat16, device="npu:0"), 1e-6)
    assert watch.calls["npu::npu_rms_norm"] == 1
    assert len(watch.errors) == errors


def test_memory_is_counted_while_it_is_held() -> None:
    watch = Watch()
    with FakeTensorMode(), watch.measuring():
        first = torch.empty(1024, dtype=torch.float32, device="npu:0")
        _ = first.view(32, 32) + 1
        del first, _
        torch.empty(256, dtype=torch.float32, device="npu:0")
    assert watch.peak == 2 * 4096


@pytest.mark.parametrize(("requests", "tokens"), [(64, 4096), (256, 2048), (300, 2048), (7, 512), (1, 256)])
def test_the_ledger_captures_what_vllm_captures(
    checkpoint: Callable[..., Path], requests: int, tokens: int
) -> None:
    config = EngineArgs(
        model=str(checkpoint("llama")),
        skip_tokenizer_init=True,
        max_num_seqs=requests,
        max_num_batched_tokens=tokens,
    ).create_engine_config()
    limits = Limits(max_num_seqs=requests, max_num_batched_tokens=tokens)
    assert capture_sizes(limits) == config.compilation_config.cudagraph_capture_sizes
