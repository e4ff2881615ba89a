"""Latent attention's first part in one operator where it fits: whether it does, and how its weights are laid out.

The joined projection of queries and latents and the up-projection of queries keep their modules, names and loading.
Once loaded, each matrix is transposed, taken apart and cast to the format of the operator, in place of the one that
was loaded: no weight is kept twice, and steps that the operator does not take multiply with the same ones.
"""

from typing import Any, Literal

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)

from npufleet.kernels.distribute_limits import generation
from npufleet.kernels.ops import quant as ops
from npufleet.kernels.ops.mla_prolog import misfit, to_nz

from ..quantization.compressed_tensors import NPUW8A8Int8
from ..quantization.linear import frozen
from ..quantization.modelslim_linear import ModelSlimDynamicMethod

Kind = Literal["bfloat16", "int8"]
"""What a projection multiplies with once it is loaded: bfloat16, or int8 with activations quantized for each token."""


def kind_of(layer: Any) -> Kind | None:
    """The kind of a linear layer; None for one that the operator does not take."""
    method = layer.quant_method
    if layer.bias is not None:
        return None
    if isinstance(method, UnquantizedLinearMethod):  # FP8 blocks among them, which are loaded as bfloat16
        return "bfloat16"
    if isinstance(method, ModelSlimDynamicMethod):
        return "int8"
    scheme = getattr(layer, "scheme", None)
    if isinstance(method, CompressedTensorsLinearMethod) and isinstance(scheme, NPUW8A8Int8):
        return None if scheme.is_static_input_scheme else "int8"
    return None


def why_not(
    *,
    chip: str,
    hidden: int,
    query_rank: int | None,
    heads: int,
    dtype: torch.dtype,
    kinds: tuple[Kind | None, Kind | None],
    context_ranks: int,
) -> str:
    """Why a layer's decode steps take separate operators, empty if one operator takes them.

    :param chip: name of the device.
    :param heads: query heads of this rank.
    :param kinds: of the joined down-projection and the queries' up-projection.
    :param context_ranks: ranks that share the cache of a sequence, whose heads are gathered between the parts.
    """
    if generation(chip) is None:
        return f"{chip} is neither of A2 nor of A3"
    if context_ranks > 1:
        return "decode context parallel gathers heads"
    if None in kinds or kinds[0] != kinds[1]:
        return "its projections are neither both of bfloat16 nor both of int8 with dynamic activations"
    return misfit(hidden=hidden, query_rank=query_rank, heads=heads, dtype=dtype)


class PartsMethod(LinearMethodBase):
    """Around a linear layer's method: the loaded weight as parts [in, n] in FRACTAL_NZ, next to each other in the
    output: ``weight`` and, if there are two, ``second_weight``; int8 ones with ``weight_scale`` and ``second_scale``
    fp32 [1, n].
    """

    def __init__(self, inner: Any, kind: Kind, widths: tuple[int, ...]) -> None:
        """:param widths: columns of one or two parts."""
        assert len(widths) in (1, 2)
        self.inner, self.kind, self.widths = inner, kind, widths

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """As the layer's own method does."""
        self.inner.create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Lay out the loaded weight. Loaded again, the parts go to the memory of the first ones (vLLM copies)."""
        self.inner.process_weights_after_loading(layer)
        weight = layer.weight.data if self.kind == "int8" else layer.weight.data.t()
        parts = [frozen(to_nz(part)) for part in weight.split(self.widths, dim=1)]
        del weight
        for name, part in zip(("weight", "second_weight"), parts, strict=False):
            layer.register_parameter(name, part)
        if self.kind == "int8":
            scales = layer.weight_scale.data.view(1, -1).split(self.widths, dim=1)
            for name, scale in zip(("weight_scale", "second_scale"), scales, strict=False):
                layer.register_parameter(name, frozen(scale.contiguous()))

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, in] to [T, out]."""
        assert bias is None
        parts = self.products(layer, x)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def products(self, layer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        """x [T, in] to the parts of the output, each [T, n]."""
        weights = self.tensors(layer)
        if self.kind == "bfloat16":
            return [torch.mm(x, weight) for weight, _ in weights]
        values, token_scale = ops.dynamic_quantize(x)
        return [
            ops.quant_matmul(values, weight, scale.view(-1), token_scale=token_scale, dtype=x.dtype)
            for weight, scale in weights
            if scale is not None
        ]

    def tensors(self, layer: Any) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each part's weight and scale."""
        names = (("weight", "weight_scale"), ("second_weight", "second_scale"))[: len(self.widths)]
        return [(getattr(layer, weight), getattr(layer, scale, None)) for weight, scale in names]


def take_apart(layer: Any, kind: Kind, widths: tuple[int, ...]) -> PartsMethod:
    """Give ``layer``, which is not loaded yet, a weight in parts of ``widths`` columns."""
    method = layer.quant_method = PartsMethod(layer.quant_method, kind, widths)
    return method
