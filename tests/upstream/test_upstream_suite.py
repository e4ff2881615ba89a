"""vLLM's own tests, run by vLLM's own configuration in a process of their own, with our plugin installed.

``UNMODIFIED`` are files of vLLM's source package as they are. ``test_platform_plugins.py`` names vLLM's
dummy platform in its assertions, so it runs twice: as it is, with the dummy platform chosen and ours
installed beside it, and with those three names replaced by ours. ``SKIPPED`` is the rest of vLLM's plugin
tests with the reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from npufleet.cluster import demo_model

from . import source

DUMMY = "dummy_platform_plugin,dummy_custom_ops"
OURS = "npufleet"
HUB_MODEL = "facebook/opt-125m"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One file of vLLM's tests: the active plugins, how many tests pass at least, which do not apply."""

    path: str
    plugins: str = OURS
    at_least: int = 1
    deselected: tuple[tuple[str, str], ...] = ()  # (test, why it does not apply)


UNMODIFIED = (
    Suite(path="plugins_tests/test_platform_plugins.py", plugins=DUMMY, at_least=3),
    Suite(
        path="plugins_tests/test_stats_logger_plugins.py",
        at_least=3,
        deselected=(
            (
                "test_stat_logger_plugin_integration_with_engine",
                "sets VLLM_PLUGINS so that no platform plugin is loaded",
            ),
        ),
    ),
    Suite(path="plugins_tests/test_endpoint_plugins.py", at_least=10),
    Suite(path="test_attention_backend_registry.py", at_least=15),
    Suite(path="model_executor/test_triton_dispatcher.py"),
    Suite(path="v1/test_kv_cache_spec_registry.py", at_least=30),
    Suite(path="v1/worker/test_gpu_input_batch.py", at_least=14),  # on the platform's device
    Suite(
        path="plugins_tests/test_scheduler_plugins.py"
    ),  # an engine, with a tiny model under the hub's name
)
SKIPPED = {
    "plugins_tests/test_oot_registration_offline.py": "generates with models from the hub",
    "plugins_tests/test_oot_registration_online.py": "serves a model from the hub",
    "plugins_tests/test_io_processor_plugins.py": "geospatial model from the hub; needs terratorch",
    "plugins_tests/test_terratorch_io_processor_plugins.py": "needs terratorch",
    "plugins_tests/test_bge_m3_sparse_io_processor_plugins.py": "embedding model from the hub",
    "plugins_tests/test_colbert_query_io_processor_plugins.py": "embedding model from the hub",
    "plugins_tests/lora_resolvers": "adapters from the hub; no platform takes part",
    "plugins_tests/gguf": "a quantization plugin that is not ours",
    "plugins_tests/bitsandbytes": "a quantization plugin that is not ours",
}
PLATFORM_TESTS = "plugins_tests/test_platform_plugins.py"
RENAMED_TESTS = "plugins_tests/test_platform_plugins_npufleet.py"
RENAMED = {
    "DummyDevice": "npu",
    "DummyRotaryEmbedding": "NPURotaryEmbedding",
    "addition_config": "forward_oot",
}


@pytest.fixture(scope="session")
def tree() -> Path:
    try:
        return source.ensure()
    except source.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face cache that holds a tiny random model under the name which vLLM's tests ask for."""
    home = tmp_path_factory.mktemp("hub")
    repo = home / "hub" / f"models--{HUB_MODEL.replace('/', '--')}"
    snapshot = repo / "snapshots" / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(demo_model.ensure())
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=64,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    OPTForCausalLM(config).save_pretrained(snapshot)
    tokenizer.save_pretrained(snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("tiny")
    return home


@pytest.fixture(scope="session")
def environment(tree: Path, hub: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    plugins = source.dummy_plugins(tree, tmp_path_factory.mktemp("plugins"))
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTEST_"))
    }
    return {
        **inherited,
        "PYTHONPATH": str(plugins),
        "HF_HOME": str(hub),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "NPUFLEET_DEVICE": "virtual:1:Ascend910B3,hbm=1GiB",
    }


Results = dict[str, list[tuple[str, str]]]  # module -> (test, "passed" | "skipped" | "failed")


def run(tree: Path, environment: dict[str, str], suites: list[Suite], report: Path) -> Results:
    """Run files that share their active plugins in one process."""
    pytest.importorskip("tblib", reason="vLLM's conftest needs it")
    files = [f"tests/{suite.path}" for suite in suites]
    unwanted = [f"not {name}" for suite in suites for name, _ in suite.deselected]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
    settings = {**environment, "VLLM_PLUGINS": suites[0].plugins}
    result = subprocess.run(
        [*command, "-k", " and ".join(unwanted)],
        cwd=tree,
        env=settings,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert report.exists(), f"vLLM's tests did not run:\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
    results: Results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        module = case.get("classname", "").removeprefix("tests.")
        results.setdefault(module, []).append((case.get("name", ""), outcome))
    print(result.stdout[-6000:])
    return results


@pytest.fixture(scope="session")
def outcomes(tree, environment, tmp_path_factory) -> Results:
    """What every file of ``UNMODIFIED`` and the renamed one gave."""
    reports = tmp_path_factory.mktemp("reports")
    text = (tree / "tests" / PLATFORM_TESTS).read_text()
    for theirs, ours in RENAMED.items():
        assert theirs in text, f"vLLM's test no longer names {theirs}"
        text = text.replace(theirs, ours)
    (tree / "tests" / RENAMED_TESTS).write_text(text)
    found: Results = {}
    for plugins in (DUMMY, OURS):
        suites = [suite for suite in (Suite(path=RENAMED_TESTS), *UNMODIFIED) if suite.plugins == plugins]
        found |= run(tree, environment, suites, reports / f"{len(found)}.xml")
    return found


def of(outcomes: Results, path: str) -> list[tuple[str, str]]:
    module = path.removesuffix(".py").replace("/", ".")
    return [case for name, cases in outcomes.items() if f"{name}.".startswith(f"{module}.") for case in cases]


@pytest.mark.parametrize("suite", UNMODIFIED, ids=lambda suite: suite.path)
def test_unmodified(suite: Suite, outcomes: Results):
    cases = of(outcomes, suite.path)
    assert [name for name, outcome in cases if outcome == "failed"] == []
    assert sum(outcome == "passed" for _, outcome in cases) >= suite.at_least


def test_platform_plugin_tests_with_our_names(outcomes: Results):
    """The file's three tests: platform found, not found too early, layer swapped."""
    assert [outcome for _, outcome in of(outcomes, RENAMED_TESTS)] == ["passed"] * 3


def test_every_plugin_test_of_vllm_is_run_or_has_a_reason(tree):
    found = {
        f"plugins_tests/{entry.name}"
        for entry in (tree / "tests" / "plugins_tests").iterdir()
        if not entry.name.startswith("__") and "npufleet" not in entry.name
    }
    assert found == {suite.path for suite in UNMODIFIED if suite.path.startswith("plugins_tests")} | set(
        SKIPPED
    )
