"""How long a step takes on a device: a model instead of a device.

A step computes prompt tokens (a chunk of prefill) and one token for each decoding request:

    seconds = base + max(weights, token * (prompt tokens + decodes)) + pair * token pairs + context * tokens read

``weights`` is reading all weights once, ``token`` the matrix products and the all-reduce of one token, ``pair``
attention between one computed token and one before it, ``context`` reading the keys and values of one token of
a decoding request, ``base`` what each step costs whatever it does.

The presets are *literature-calibrated*, not measured: products and reads follow from the model's size, the
nominal device (354 BF16 TFLOPS and 752 INT8 TOPS, 64 GiB at 1.6 TB/s per die; Ascend/msmodeling
``tensor_cast/device.py``) and assumed efficiencies (half of the peak, 0.6 of the bandwidth), and ``base`` is
set so that the published throughput of vllm-ascend's nightly gates comes out: Qwen3-32B INT8 on four dies,
3.5K tokens in and 1.5K out, 1,065 tokens/s at 72 requests on A2 and 1,249 tokens/s at 76 on A3.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTime:
    """Costs in seconds, and what bounds a step."""

    base: float
    weights: float
    token: float
    pair: float
    context: float
    kv_tokens: int  # tokens that the KV cache holds
    max_batched_tokens: int = 8192  # of one step
    max_seqs: int = 256  # requests in the running batch

    def __post_init__(self) -> None:
        costs = (self.base, self.weights, self.token, self.pair, self.context)
        if min(costs) < 0 or self.base + self.token <= 0:
            raise ValueError(f"costs of a step must not be negative, and a step must cost something: {self}")
        if min(self.kv_tokens, self.max_batched_tokens, self.max_seqs) < 1:
            raise ValueError(f"kv_tokens, max_batched_tokens and max_seqs must be 1 or more: {self}")

    def step(self, prompt_tokens: int, pairs: float, decodes: int, context: int) -> float:
        """Seconds of one step: ``prompt_tokens`` computed with ``pairs`` token pairs of attention, and
        ``decodes`` requests that read ``context`` tokens in all.
        """
        products = max(self.weights, self.token * (prompt_tokens + decodes))
        return self.base + products + self.pair * pairs + self.context * context

    def slowed(self, factor: float) -> DeviceTime:
        """A device that takes ``factor`` times as long for everything."""
        return replace(
            self,
            base=self.base * factor,
            weights=self.weights * factor,
            token=self.token * factor,
            pair=self.pair * factor,
            context=self.context * factor,
        )


_QWEN3_32B_TP4 = DeviceTime(
    base=0.0257,
    weights=8.5e-3,  # 32.8 GB of INT8 weights over four dies at 0.96 TB/s each
    token=69e-6,  # 65.6 GFLOP at half of 4 * 752 TOPS, less conversions; two all-reduces per layer over HCCS
    pair=3.0e-9,  # 2.1 MFLOP (64 layers, 64 heads of 128) at half of 4 * 354 TFLOPS
    context=68e-9,  # 262,144 bytes of keys and values per token over four dies at 0.96 TB/s each
    kv_tokens=768_000,  # 0.9 of 4 * 64 GiB less weights and 10 GB of activations, rounded down to blocks
)

PRESETS: Mapping[str, DeviceTime] = {
    "a2-qwen3-32b-tp4": _QWEN3_32B_TP4,
    "a3-qwen3-32b-tp4": replace(_QWEN3_32B_TP4, base=0.0172),
}
DEFAULT_PRESET = "a3-qwen3-32b-tp4"


def preset(name: str) -> DeviceTime:
    """The preset called ``name``; ValueError names the known ones."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown device-time preset {name!r}{hint}; known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
