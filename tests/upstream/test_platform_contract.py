"""The platform answers whatever vLLM asks it: every name that vLLM's source reads from ``current_platform``.

vLLM returns None, with a warning, for a name that a platform lacks, so a missing member would not raise.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform

# Read only on a platform that is_cuda(), is_rocm() and so on: asked of no other.
FOREIGN = ("cuda", "rocm", "xpu", "tpu", "cpu", "zen", "amd", "gfx", "gcn", "nvml", "fi_")

# Members that vLLM reads in code that this platform does not reach; see where before adding one.
NOT_REACHED = {
    "discover_numa_topology": "thread binding of the CPU backend",
    "get_all_device_numa_nodes": "NUMA binding, which asks whether the platform is CUDA first",
    "insert_blocks_to_device": "connectors with a staging buffer in host memory (kv_buffer_device: cpu)",
    "swap_out_blocks_to_host": "connectors with a staging buffer in host memory (kv_buffer_device: cpu)",
    "is_fully_connected": "CUDA's custom all-reduce",
    "pack_kv_cache": "packed KV caches of another device",
    "check_runner_kv_caches_multi_layer": "encoder-decoder models, which the platform refuses",
    "get_all_gpu_pci_bus_ids": "network cards of CUDA hosts",
    "get_punica_wrapper": "LoRA, which the platform refuses",
}


def names_that_vllm_reads() -> set[str]:
    """Attributes of ``current_platform`` in vLLM's source, but for what belongs to other devices."""
    root = Path(inspect.getfile(vllm)).parent
    found: set[str] = set()
    for path in root.rglob("*.py"):
        if "platforms" in path.parts or "third_party" in path.parts:
            continue
        text = path.read_text()
        if "current_platform" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "current_platform":
                found.add(node.attr)
    return {name for name in found - set(NOT_REACHED) if not any(word in name.lower() for word in FOREIGN)}


NAMES = sorted(names_that_vllm_reads())


def test_the_search_finds_the_contract():
    assert {"device_type", "get_attn_backend_cls", "check_and_update_config", "set_device"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists(name: str):
    """On the platform, or on ``torch.npu``, where vLLM looks next."""
    assert (
        hasattr(type(current_platform), name)
        or name in vars(Platform).get("__annotations__", {})
        or hasattr(torch.npu, name)
    ), f"current_platform.{name} would be None"


def callable_without_arguments(name: str) -> bool:
    member = getattr(type(current_platform), name, None)
    if not inspect.ismethod(member):  # a classmethod, bound to the class
        return False
    parameters = inspect.signature(member).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


@pytest.mark.parametrize("name", [name for name in NAMES if callable_without_arguments(name)])
def test_a_question_without_arguments_is_answered(name: str):
    torch.npu.set_device(0)
    with set_current_vllm_config(VllmConfig()):
        getattr(current_platform, name)()


def test_a_pluggable_layer_can_be_replaced_on_this_platform(monkeypatch: pytest.MonkeyPatch):
    """vLLM swaps a whole layer class for an out-of-tree one by name."""
    from vllm.model_executor import custom_op

    others = {name: kept for name, kept in custom_op.op_registry_oot.items() if name != "RowParallelLinear"}
    monkeypatch.setattr(custom_op, "op_registry_oot", others)

    @PluggableLayer.register_oot(name="RowParallelLinear")
    class Replacement(RowParallelLinear):
        pass

    with set_current_vllm_config(VllmConfig()):
        layer = RowParallelLinear.__new__(RowParallelLinear)
    assert type(layer) is Replacement
