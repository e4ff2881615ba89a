"""The attention metadata of a step, as the plugin's builders make it, with its device tensors turned fake."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """A batch: of each request the new tokens and those before them."""

    name: str
    queries: list[int]
    computed: list[int]

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.queries)


def metadata(
    config: VllmConfig, step: StepSizes, mode: FakeTensorMode, device: torch.device
) -> dict[str, Any]:
    """Layer name → metadata. The builders run on real host numbers and small real tables; layers of one spec and
    backend share what they get, as layers of one KV cache group do.
    """
    common = _common(step, device)
    ranks = config.parallel_config.decode_context_parallel_size
    if ranks > 1:
        common.dcp_local_seq_lens = (common.seq_lens // ranks).int()
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, layer in config.compilation_config.static_forward_context.items():
        if hasattr(layer, "get_kv_cache_spec"):
            backend = layer.get_attn_backend()
            groups[backend, backend.customize_spec(layer.get_kv_cache_spec(config))].append(name)
    made = {}
    for (backend, spec), names in groups.items():
        builder = backend.get_builder_cls()(spec, names, config, device)
        shared = _faked(builder.build(0, common), mode)
        made.update(dict.fromkeys(names, shared))
    return made


def _common(step: StepSizes, device: torch.device) -> CommonAttentionMetadata:
    """The batch as vLLM's runner describes it to the builders."""
    ends = torch.zeros(len(step.queries) + 1, dtype=torch.int32)
    ends[1:] = torch.tensor(step.queries).cumsum(0)
    lens = torch.tensor(step.queries, dtype=torch.int32) + torch.tensor(step.computed, dtype=torch.int32)
    longest = int(lens.max())
    return CommonAttentionMetadata(
        query_start_loc=ends.to(device),
        query_start_loc_cpu=ends,
        seq_lens=lens.to(device),
        seq_lens_cpu_upper_bound=lens,
        num_reqs=len(step.queries),
        num_actual_tokens=step.tokens,
        max_query_len=max(step.queries),
        max_seq_len=longest,
        block_table_tensor=torch.zeros(
            len(step.queries), -(-longest // BLOCK), dtype=torch.int32, device=device
        ),
        slot_mapping=torch.zeros(step.tokens, dtype=torch.int64, device=device),
    )


def _faked(value: Any, mode: FakeTensorMode) -> Any:
    """``value`` with every device tensor in it turned fake, in place where it is a dataclass."""
    if torch.is_tensor(value):
        fake = isinstance(value, FakeTensor) or value.device.type == "cpu"
        return value if fake else mode.from_tensor(value)
    if isinstance(value, list):
        return [_faked(x, mode) for x in value]
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            object.__setattr__(value, field.name, _faked(getattr(value, field.name, None), mode))
    return value
