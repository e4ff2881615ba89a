"""Checkpoints that ModelSlim (Ascend's quantization tool) wrote: ``quant_model_description.json`` beside the weights.

The description gives a kind for every tensor. vLLM knows the format by the name ``ascend``.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.transformers_utils.repo_utils import file_or_path_exists

from .experts import NPUW8A8ExpertsMethod
from .linear import check_static_layer
from .modelslim_linear import ModelSlimDynamicMethod, ModelSlimStaticMethod

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.utils import WeightsMapper

NAME = "ascend"
FILE = "quant_model_description.json"
FLOAT, STATIC, DYNAMIC = "FLOAT", "W8A8", "W8A8_DYNAMIC"
LINEAR: dict[str, type[LinearMethodBase]] = {
    FLOAT: UnquantizedLinearMethod,
    STATIC: ModelSlimStaticMethod,
    DYNAMIC: ModelSlimDynamicMethod,
}
JOINED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}
"""What vLLM joins everywhere. Some models add it to their own mapping only after vLLM has handed that to us."""
CACHE_KEYS = ("fa_quant_type", "kv_quant_type", "kv_cache_type", "indexer_quant_type")


class ModelSlimConfig(QuantizationConfig):
    """The kinds of a checkpoint's tensors."""

    def __init__(self, kinds: dict[str, str]) -> None:
        """:param kinds: tensor name → kind."""
        super().__init__()
        self.kinds = kinds

    def get_name(self) -> str:  # type: ignore[override]  # vLLM lists its own names only
        """``ascend``."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """What the operators quantize and return."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """0: NPUs have no CUDA compute capability."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """The description."""
        return [FILE]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ModelSlimConfig":
        """The configuration of a description.

        :raises ValueError: kinds of weights or of caches that NPUs do not run, with those that they do.
        """
        cache = {key: config[key] for key in CACHE_KEYS if config.get(key)}
        if cache:
            raise ValueError(
                f"{FILE} asks for a quantized cache ({cache}), which is not supported on NPU yet: quantize the "
                "model without it"
            )
        kinds = {key: value for key, value in config.items() if key.endswith(".weight")}
        unknown = sorted({str(kind) for kind in kinds.values()} - set(LINEAR))
        if unknown:
            raise ValueError(
                f"{FILE} has weights of the kinds {', '.join(unknown)}, which are not supported on NPU yet; "
                f"supported are {', '.join(LINEAR)}"
            )
        return cls(kinds)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: "WeightsMapper") -> None:
        """Name the tensors as vLLM's model does."""
        self.kinds = hf_to_vllm_mapper.apply_dict(self.kinds)

    def kind_of(self, names: list[str]) -> str:
        """The one kind of the weights ``names``.

        :raises ValueError: several kinds in one layer, or none in the description.
        """
        kinds = {self.kinds.get(f"{name}.weight") for name in names}
        if len(kinds) != 1:
            raise ValueError(f"{FILE} gives {names}, which make one layer, several kinds: {kinds}")
        (kind,) = kinds
        if kind is None:
            raise ValueError(f"{FILE} says nothing of {', '.join(names)}; the checkpoint is not complete")
        return kind

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer by the kind of its weights; None for layers that are never quantized.

        :raises ValueError: a kind that this layer cannot have.
        """
        if isinstance(layer, LinearBase):
            parent, _, leaf = prefix.rpartition(".")
            parts = (JOINED | self.packed_modules_mapping).get(leaf, [leaf])
            kind = self.kind_of([f"{parent}.{part}" if parent else part for part in parts])
            if kind == STATIC:
                check_static_layer(prefix)
            return LINEAR[kind]()
        if isinstance(layer, RoutedExperts):
            projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            kind = self.kind_of([f"{prefix}.0.{name}" for name in projections])
            if kind == FLOAT:
                return UnquantizedFusedMoEMethod(layer.moe_config)
            if kind == DYNAMIC:
                return NPUW8A8ExpertsMethod(layer.moe_config, with_offsets=True)
            raise ValueError(
                f"{prefix}: experts of kind {kind} are not supported on NPU yet; supported are {FLOAT} and {DYNAMIC}"
            )
        if isinstance(layer, VocabParallelEmbedding):
            kind = self.kinds.get(f"{prefix}.weight", FLOAT)
            if kind != FLOAT:
                raise ValueError(f"{prefix}: kind {kind} is not supported on NPU yet; leave it {FLOAT}")
        return None


def recognise(config: "VllmConfig") -> None:
    """Choose the format for a checkpoint that has the description, where the user named none.

    ModelSlim leaves config.json as it was, so vLLM alone would read the integers as if they were the weights.
    """
    model = config.model_config
    if model is None or model.quantization is not None:
        return
    if file_or_path_exists(model.model, FILE, model.revision):
        model.quantization = NAME  # type: ignore[assignment]  # vLLM lists its own names only
        config.quant_config = type(config).get_quantization_config(model, config.load_config)
