"""The contract between vLLM and Ascend NPUs: vLLM asks this class whatever depends on the device."""

import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

from .quantization import check_quantization
from .support import apply_defaults, check_config, choose_backend

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class NPUPlatform(Platform):
    """Ascend NPUs as vLLM's out-of-tree platform ``npu``."""

    _enum = PlatformEnum.OOT
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    dist_backend = "hccl"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    ray_noset_device_env_vars = ["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"]  # noqa: RUF012 vLLM's type
    simple_compile_backend = "eager"
    additional_env_vars = ["ASCEND_RT_VISIBLE_DEVICES"]  # noqa: RUF012 vLLM's type

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """Model dtypes, the preferred one first."""
        return list(SUPPORTED_DTYPES)

    # Configuration

    @classmethod
    def pre_register_and_update(cls, parser: "FlexibleArgumentParser | None" = None) -> None:
        """Choose vLLM's first model runner, before any configuration asks which one it is.

        The second one is written in Triton kernels for CUDA; vLLM would take it wherever Triton finds a
        driver.
        """
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        """Fill in what the user left open and turn off what NPUs do otherwise, with a log line for each."""
        cls.pre_register_and_update()
        apply_defaults(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Refuse by name what is not supported; choose the worker. Called again for each copy of a
        configuration.

        :raises ValueError: an unsupported feature, with what to use in its stead.
        """
        check_config(vllm_config)

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """:raises ValueError: a quantization format that NPUs do not run."""
        check_quantization(quant)

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """:raises ValueError: a model dtype other than bfloat16, float16 and float32."""
        if dtype not in SUPPORTED_DTYPES:
            allowed = ", ".join(str(x).removeprefix("torch.") for x in SUPPORTED_DTYPES)
            raise ValueError(f"dtype {dtype} is not supported on NPU; use one of {allowed}")

    # Classes that vLLM loads by name

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: "AttentionBackendEnum | None",
        attn_selector_config: "AttentionSelectorConfig",
        num_heads: int | None = None,
    ) -> str:
        """The import path of the attention backend for a layer: dense, MLA or sparse.

        :raises ValueError: a layer that no backend takes, with the reasons.
        """
        return choose_backend(selected_backend, attn_selector_config)

    @classmethod
    def get_mla_prefill_backend_cls(
        cls, mla_selector_config: "MLAPrefillSelectorConfig"
    ) -> "type[MLAPrefillBackend]":
        """What prefills the layers of multi-head latent attention.

        :raises ValueError: a dtype or sizes that the operators do not take.
        """
        from .attention.mla_prefill import NPUMLAPrefillBackend

        reasons = NPUMLAPrefillBackend.validate_configuration(None, mla_selector_config)
        if reasons:
            raise ValueError(f"latent attention on NPU cannot prefill this model: {'; '.join(reasons)}")
        return NPUMLAPrefillBackend

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The collectives of a group."""
        return "npufleet.plugin.communicator.NPUCommunicator"

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """What captures and replays a model's step."""
        return "npufleet.plugin.graph.ACLGraphWrapper"

    # What vLLM may use

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Decode steps are captured as ACL graphs."""
        return True

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Layers with and without a sliding window have cache groups of their own."""
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Nothing to object: a layer may have several caches, as latent attention has; nobody here counts
        them.
        """

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """False: nothing is compiled, so attention is called directly, not through the dispatcher."""
        return False

    def is_sleep_mode_available(self) -> bool:
        """Not yet: it needs an allocator that gives memory back to the device by tag."""
        return False

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing: vLLM's own compiled kernels are for other devices."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Nothing: vLLM's IR falls back to its PyTorch forms."""

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace the Triton kernels of vLLM's runner; a second call changes nothing."""
        from vllm.triton_utils import dispatcher

        from .triton_kernels import REPLACEMENTS

        missing = {k: v for k, v in REPLACEMENTS.items() if k not in dispatcher._registry}
        if missing:
            dispatcher.register_kernels(missing)

    # The device

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Make ``device`` current in this thread."""
        torch.npu.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed the generators of all NPUs of this process."""
        torch.npu.manual_seed_all(seed)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The chip, such as ``Ascend910B3``."""
        return torch.npu.get_device_name(device_id)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """None: NPUs have no CUDA compute capability."""
        return None

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """An identifier of the NPU on this host; NPUs publish no universal one."""
        return f"npu-{cls.visible_device_id_to_physical_device_id(device_id)}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of memory of an NPU that this process has opened.

        :raises NotImplementedError: the process has opened none. Front ends ask this to pick defaults, and
            opening a device would take memory on it that they never use.
        """
        if not torch.npu.is_initialized():
            raise NotImplementedError("this process has no NPU open")
        return torch.npu.get_device_properties(device_id).total_memory

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Peak bytes allocated on ``device`` from now on, which is what is allocated now."""
        torch.npu.empty_cache()
        torch.npu.reset_peak_memory_stats(device)
        return torch.npu.max_memory_allocated(device)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Cube cores of the NPU."""
        return torch.npu.get_device_properties(device_id).cube_core_num

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Host buffers are pinned, so that copies to the NPU do not wait."""
        return True
