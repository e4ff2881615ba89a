"""An engine's core shows under its name whatever the order of its environment."""

from __future__ import annotations

import os
import subprocess
import sys

CORE = """
import multiprocessing
from pathlib import Path

import ray
import setproctitle

from npufleet.cluster.engine import title

multiprocessing.parent_process = lambda: "the engine"
setproctitle.setproctitle("VLLM::EngineCore")  # as vLLM does
print("EngineCore" in Path("/proc/self/cmdline").read_text())
title.show("VLLM")
print(Path("/proc/self/cmdline").read_text().rstrip(chr(0)))
"""


def _names(environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-"], input=CORE, capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.splitlines()


def test_a_core_has_its_name_though_ray_sets_the_first_variable_of_its_environment() -> None:
    others = {name: value for name, value in os.environ.items() if name != "RAY_CLIENT_MODE"}
    assert _names({"RAY_CLIENT_MODE": "0", **others}) == ["False", "VLLM::EngineCore"], (
        "if the first is True, setproctitle needs no help any more"
    )
    assert _names({"A_FIRST": "1", **others, "RAY_CLIENT_MODE": "0"}) == ["True", "VLLM::EngineCore"]
