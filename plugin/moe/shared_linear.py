"""Linear layers of shared experts: split over the tensor-parallel ranks, whole on each, or on some ranks alone.

vLLM's models decide this when they build the layers; a layer whose name says that it is of shared experts follows the
user's choice instead. Every other layer is vLLM's, unchanged.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from .placement import PLACEMENT, Placement, SharedPlacement, shared_placement

NAMES = frozenset({"shared_expert", "shared_experts"})
"""What models call the module of their shared experts."""


class Absent(QuantizeMethodBase):
    """The method of a layer that another rank computes."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Nothing: the layer is emptied after another method has made its weights."""
        raise AssertionError("a layer that is absent has no weights to make")

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Not reached."""
        raise AssertionError("another rank computes this layer")


def _asked(prefix: str) -> SharedPlacement:
    """The user's choice for the layer called ``prefix``."""
    if NAMES.isdisjoint(prefix.split(".")):
        return SharedPlacement()
    config = get_current_vllm_config_or_none()
    return SharedPlacement() if config is None else shared_placement(config)


class _Placed:
    """What both kinds of layers have in common; goes before vLLM's class."""

    absent: bool
    moved: bool
    claimed: bool

    def __init__(self, *args: Any, disable_tp: bool = False, **kwargs: Any) -> None:
        """Arguments as vLLM's layer."""
        asked = _asked(kwargs.get("prefix", ""))
        whole = asked.ranks > 0 or asked.placement is Placement.WHOLE
        given = whole or (disable_tp and asked.placement is not Placement.SPLIT)
        self.absent = asked.ranks > 0 and get_ep_group().rank_in_group >= asked.ranks
        self.moved = given != disable_tp or asked.ranks > 0
        self.claimed = False
        super().__init__(*args, disable_tp=given, **kwargs)  # type: ignore[call-arg]
        if self.absent:
            _empty(self)

    def weight_loader(self, param: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; what a layer that is absent is given is left in the checkpoint.

        vLLM's reloading looks for ``param`` by its name among the arguments, to put another in its place.
        """
        if self.absent:
            return None
        return super().weight_loader(param, loaded_weight, *args, **kwargs)  # type: ignore[misc]

    def weight_loader_v2(self, param: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`weight_loader`."""
        if self.absent:
            return None
        return super().weight_loader_v2(param, loaded_weight, *args, **kwargs)  # type: ignore[misc]


def _empty(layer: Any) -> None:
    """Give back the memory of a layer's weights; their names stay, so that loading finds them."""
    for parameter in layer.parameters():
        parameter.data = parameter.data.new_empty(0)
    layer.quant_method = Absent()


class NPUMergedColumnParallelLinear(_Placed, MergedColumnParallelLinear):
    """vLLM's joined gate and up projections."""


class NPURowParallelLinear(_Placed, RowParallelLinear):
    """vLLM's down projection."""


LAYERS = {
    "MergedColumnParallelLinear": NPUMergedColumnParallelLinear,
    "RowParallelLinear": NPURowParallelLinear,
}


def placed(module: nn.Module) -> Iterator[_Placed]:
    """The layers under ``module`` that can be placed."""
    return (layer for layer in module.modules() if isinstance(layer, _Placed))


def claim(module: nn.Module) -> None:
    """Say that ``module``, the shared experts of a layer, is computed where the user's choice puts it."""
    for layer in placed(module):
        layer.claimed = True


def check_claimed(model: nn.Module) -> None:
    """:raises ValueError: shared experts that the model computes by itself, outside of vLLM's layer of experts."""
    for name, layer in model.named_modules():
        if isinstance(layer, _Placed) and layer.moved and not layer.claimed:
            raise ValueError(
                f"{name}: {type(model).__name__} computes its shared experts outside of the layer of experts, so they "
                f"stay where vLLM puts them: leave {PLACEMENT} and its companions out of additional_config"
            )
