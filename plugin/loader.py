"""vLLM's loader of weights, with a look at what the checkpoint left as the memory was.

vLLM misses weights that are lacking only where layers have no method of their own: linear layers and experts, most of
a model, are exempt, and so is everything of a quantized model. Here every weight is filled with numbers that no
checkpoint has before it is loaded, and looked at afterwards.
"""

from collections.abc import Generator, Iterator
from dataclasses import replace

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor import model_loader
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

PREFIX = "npu-"
LEAVES = ("weight", "bias", "weight_packed", "w13_weight", "w2_weight", "e_score_correction_bias")
"""The parameters that a checkpoint must fill. Scales are marked by the methods that have them
(``quantization/linear.py: await_scales``); others have a meaning when they are absent."""
SHOWN = 4
_CHUNK = 1 << 26
"""Elements that are looked at at a time: what the look itself takes of the NPU's memory, in bytes."""
_NAN_8 = 0x7F
"""The bits of a number that is none, in both 8-bit floating-point formats."""


def checked(config: LoadConfig) -> LoadConfig:
    """The configuration that loads as ``config`` does and then looks at the weights.

    Formats that vLLM's default loader does not read are left as they are, and so is a user's
    ``enable_weights_track: false``.
    """
    name = config.load_format
    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    extra = config.model_loader_extra_config
    wanted = not isinstance(extra, dict) or extra.get("enable_weights_track") is not False
    if loaders.get(name) is not DefaultModelLoader or not wanted:
        return config
    if PREFIX + name not in loaders:
        model_loader.register_model_loader(PREFIX + name)(CheckedLoader)
    return replace(config, load_format=PREFIX + name)


class CheckedLoader(DefaultModelLoader):
    """vLLM's default loader; a weight that the checkpoint did not give is an error."""

    def __init__(self, load_config: LoadConfig) -> None:
        """:param load_config: with a format from :func:`checked`."""
        plain = load_config.load_format.removeprefix(PREFIX)
        super().__init__(replace(load_config, load_format=plain))
        self._last = ""  # the tensor that is being loaded

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The checkpoint's tensors, as vLLM's; the one handed out last is remembered for errors."""
        for name, tensor in super().get_all_weights(model_config, model):
            self._last = f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            yield name, tensor
        self._last = ""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the weights.

        :raises ValueError: some were not in the checkpoint, do not fit, or hold no numbers; it names them.
        """
        marked = dict(weights(model))
        for weight in marked.values():
            mark(weight)
        try:
            super().load_weights(model, model_config)
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, LookupError, ValueError, RuntimeError) as error:
            if not self._last:
                raise
            raise ValueError(
                f"{model_config.model}: the tensor {self._last} of the checkpoint does not fit the model that "
                f"config.json describes: {error}"
            ) from error
        missing = [name for name, weight in marked.items() if is_marked(weight)]
        if missing:
            modules = dict(model.named_modules())
            packed = getattr(model, "packed_modules_mapping", {})
            shown = ", ".join(_describe(name, modules, packed) for name in missing[:SHOWN])
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            raise ValueError(
                f"{model_config.model}: the checkpoint gave no values for {shown}{more}; fetch it again or convert "
                "it anew"
            )


def weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and memory of the parameters of ``model`` that a checkpoint must fill."""
    for prefix, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            real = not isinstance(parameter, nn.parameter.UninitializedParameter)
            if name in LEAVES and real and parameter.device.type != "meta" and parameter.numel():
                yield f"{prefix}.{name}" if prefix else name, parameter.data


def mark(weight: torch.Tensor) -> None:
    """Fill ``weight`` with what no checkpoint has: no number, or the smallest integer."""
    if weight.dtype.itemsize == 1 and weight.dtype.is_floating_point:
        weight.view(torch.uint8).fill_(_NAN_8)
    elif weight.dtype.is_floating_point:
        weight.fill_(float("nan"))
    else:
        weight.fill_(torch.iinfo(weight.dtype).min)


def is_marked(weight: torch.Tensor) -> bool:
    """Whether a part of ``weight`` is as :func:`mark` left it.

    Floating point: any element. The smallest integer can be a weight, a whole row or column of it is none.
    """
    rows = weight.reshape(1, -1) if weight.dim() < 2 else weight
    step = max(1, _CHUNK // max(1, rows[0].numel()))
    return any(bool(_marks(part).any()) for part in rows.split(step))


def _marks(part: torch.Tensor) -> torch.Tensor:
    """part [n, …, m]: where it is marked; for integers over whole rows and columns."""
    if part.dtype.itemsize == 1 and part.dtype.is_floating_point:
        return part.view(torch.uint8) == _NAN_8
    if part.dtype.is_floating_point:
        return part.isnan()
    same = part == torch.iinfo(part.dtype).min
    return torch.cat((same.all(-1).flatten(), same.all(-2).flatten()))


def _describe(name: str, modules: dict[str, nn.Module], packed: dict[str, list[str]]) -> str:
    """The name, and of projections that vLLM joins those that are missing, as the checkpoint calls them."""
    prefix, _, leaf = name.rpartition(".")
    module = modules.get(prefix)
    parts = packed.get(prefix.rpartition(".")[2], [])
    sizes = getattr(module, "output_partition_sizes", [])
    weight = getattr(module, leaf, None)
    if weight is None or len(parts) != len(sizes) or sum(sizes) != weight.shape[0]:
        return name
    split = zip(parts, weight.data.split(sizes), strict=True)
    missing = [part for part, rows in split if is_marked(rows)]
    return f"{name} ({', '.join(missing)})"
