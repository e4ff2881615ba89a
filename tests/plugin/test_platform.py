"""The platform contract: what vLLM asks of an out-of-tree platform, and which vLLM it was written against."""

import ast
import importlib
import inspect
import pickle
from pathlib import Path

import pytest
import torch
import vllm
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from npufleet.plugin import register, register_layers
from npufleet.plugin.attention import BACKENDS
from npufleet.plugin.platform import NPUPlatform


def test_the_entry_point_names_the_platform_that_vllm_then_runs() -> None:
    assert resolve_obj_by_qualname(register()) is NPUPlatform
    assert isinstance(current_platform, NPUPlatform)
    assert current_platform.is_out_of_tree() and current_platform._enum == PlatformEnum.OOT
    assert (current_platform.device_type, current_platform.device_name) == ("npu", "npu")
    assert (current_platform.dist_backend, current_platform.ray_device_key) == ("hccl", "NPU")
    assert torch.device(f"{current_platform.device_name}:0").type == "npu"


def test_every_override_of_the_platform_still_exists_upstream() -> None:
    ours = {n for n in vars(NPUPlatform) if not n.startswith("__")}
    assert ours - set(dir(Platform)) <= set(Platform.__annotations__), "vLLM no longer asks for these"
    for name in ours & set(dir(Platform)):
        theirs, mine = inspect.getattr_static(Platform, name), inspect.getattr_static(NPUPlatform, name)
        if isinstance(theirs, classmethod):
            assert isinstance(mine, classmethod), name
            wanted = list(inspect.signature(theirs.__func__).parameters)
            assert list(inspect.signature(mine.__func__).parameters)[: len(wanted)] == wanted, name


@pytest.mark.parametrize("name", ["get_device_communicator_cls", "get_static_graph_wrapper_cls"])
def test_classes_named_to_vllm_exist(name: str) -> None:
    assert inspect.isclass(resolve_obj_by_qualname(getattr(NPUPlatform, name)()))


def test_what_raises_by_default_is_answered() -> None:
    """Members whose default raises NotImplementedError, but for those that only other platforms meet."""
    not_asked = {
        "get_punica_wrapper",  # LoRA, refused
        "get_all_gpu_pci_bus_ids",  # RDMA cards of CUDA hosts
        "stateless_init_device_torch_dist_pg",  # elastic expert parallelism
        "check_runner_kv_caches_multi_layer",  # encoder-decoder models
    }
    tree = ast.parse(Path(inspect.getfile(Platform)).read_text())
    (cls,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Platform"]
    raising = {
        f.name
        for f in cls.body
        if isinstance(f, ast.FunctionDef)
        and any(isinstance(n, ast.Raise) and "NotImplementedError" in ast.unparse(n) for n in f.body)
    }
    assert "get_device_name" in raising
    assert raising - not_asked <= set(vars(NPUPlatform))


def test_the_device() -> None:
    torch.npu.set_device(0)
    assert NPUPlatform.get_device_name(0).startswith("Ascend")
    assert NPUPlatform.get_device_total_memory(0) == torch.npu.mem_get_info(0)[1]
    assert NPUPlatform.get_device_uuid(0)
    assert NPUPlatform.num_compute_units(0) > 0
    before = NPUPlatform.get_current_memory_usage()
    kept = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
    assert NPUPlatform.get_current_memory_usage() - before >= kept.numel()
    assert current_platform.device_count() == torch.npu.device_count()


def test_visible_devices_are_those_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5,2")
    assert NPUPlatform.visible_device_id_to_physical_device_id(1) == 2
    assert NPUPlatform.logical_device_id_to_visible_device_id(0) == 0
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "five")
    with pytest.raises(ValueError, match="five"):
        NPUPlatform.visible_device_id_to_physical_device_id(0)


def test_the_worker_can_be_pickled_by_name() -> None:
    from npufleet.plugin.worker import NPUWorker

    assert pickle.loads(pickle.dumps(NPUWorker)) is NPUWorker


def test_registering_twice_changes_nothing() -> None:
    register_layers()
    members = list(AttentionBackendEnum.__members__)
    register_layers()
    NPUPlatform.register_triton_kernel_overrides()
    NPUPlatform.register_triton_kernel_overrides()
    assert members == list(AttentionBackendEnum.__members__)


def wish(**changes: object) -> AttentionSelectorConfig:
    fields = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
    return AttentionSelectorConfig(**(fields | changes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "changes",
    [{}, {"has_sliding_window": True}, {"attn_type": AttentionType.ENCODER_ONLY}, {"block_size": 256}],
)
def test_dense_attention_is_chosen(changes: dict[str, object], dtype: torch.dtype) -> None:
    register_layers()
    backend = resolve_obj_by_qualname(NPUPlatform.get_attn_backend_cls(None, wish(dtype=dtype, **changes)))
    assert issubclass(backend, AttentionBackend)
    assert AttentionBackendEnum[backend.get_name()].get_path() == BACKENDS[backend.get_name()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_mla": True}, r"latent attention.*head_size not supported.*512"),
        ({"use_mla": True, "use_sparse": True}, r"sparse attention is not supported on NPU yet"),
        ({"head_size": 40}, r"head_size not supported.*multiple of 16"),
        ({"block_size": 16}, r"block_size not supported.*multiple of 128"),
        ({"kv_cache_dtype": "fp8"}, r"kv_cache_dtype not supported"),
        ({"has_sink": True}, r"attention sinks not supported"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, r"ENCODER_DECODER not supported"),
    ],
)
def test_other_layers_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NPUPlatform.get_attn_backend_cls(None, wish(**changes))


def test_another_platforms_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="FLASH_ATTN is not for NPU"):
        NPUPlatform.get_attn_backend_cls(AttentionBackendEnum.FLASH_ATTN, wish())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "soft cap"),
        ({"sinks": torch.zeros(1)}, "sinks"),
        ({"attn_type": AttentionType.ENCODER_ONLY, "sliding_window": 8}, "sliding window without"),
    ],
)
def test_attention_that_the_operator_does_not_compute_is_refused(
    changes: dict[str, object], message: str
) -> None:
    from npufleet.plugin.attention.dense import AscendAttentionImpl

    with pytest.raises(ValueError, match=message):
        AscendAttentionImpl(4, 64, 0.125, 2, **changes)


def test_the_plugin_never_asks_what_kind_of_npu_it_runs_on() -> None:
    folder = Path(importlib.import_module("npufleet.plugin").__file__ or "").parent
    for path in folder.rglob("*.py"):
        text = path.read_text().lower()
        assert "virtual" not in text and "npufleet_device" not in text, path
        assert "import torch_npu" not in text, path


def test_vllm_is_the_version_that_was_read() -> None:
    assert vllm.__version__.startswith("0.32.0")
