"""The block-level model against vLLM's own scheduler and KV-cache manager, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from npufleet.cluster.gateway.process import GATEWAY_ENV

ROOT = Path(__file__).resolve().parents[2]


def compare(blocks: int) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.sim_compare", str(blocks)],
        cwd=ROOT,
        env={**os.environ, **GATEWAY_ENV},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_times_and_hits_are_the_same_where_nothing_is_preempted():
    found = compare(400)
    assert found["preempted"] == [0, 0] and found["hits"] > 60
    assert found["cached"] == 0 and found["first"] < 1e-6 and found["end"] < 1e-6


@pytest.mark.slow
def test_they_stay_close_where_blocks_run_out():
    found = compare(150)
    real, model = found["preempted"]
    assert real and abs(real - model) <= 2 + real // 5
    assert found["cached"] <= 6 and max(found["first"], found["end"]) < 0.03 * found["seconds"]
