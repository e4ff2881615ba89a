"""One rank of a full-size model without weights: every shape of its forward pass, and the memory it takes.

The model is the one that vLLM builds on this platform, made of FakeTensors on the device ``npu``: shapes, dtypes and
strides without data. The other ranks are a process group of torch's ``fake`` backend, whose collectives move nothing.
What vLLM asks other processes for while it sets the groups up is answered here, in this process alone.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # gives the collectives shapes
from contract_steps import StepSizes, metadata
from contract_watch import Watch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from npufleet.kernels.ops.attention import causal_mask, no_lse
from npufleet.kernels.reference import communicator
from npufleet.plugin.moe.communication import group as mc2_group

NPU = torch.device("npu:0")
BLOCK = 128
FEW = 2048
"""Bytes of a tensor up to which it is a scale or a map of numbers, not a part of the ledger."""
BLOCKS = 1024
_NO_DATA = torch.library.Library("npu", "IMPL")
# torch_npu has no Meta kernel of the cast; FakeTensors have no storage format.
_NO_DATA.impl("npu_format_cast", lambda x, acl_format, **_: torch.empty_like(x), "Meta")
"""Blocks of a KV cache: any number does, nothing is stored."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model in one layout."""

    name: str
    config: dict[str, Any]
    tensor: int
    data: int
    expert_parallel: bool
    context: int
    """Ranks that share the KV cache of a sequence."""
    tokens: int
    requests: int
    max_model_len: int
    options: dict[str, Any] = field(default_factory=dict)
    """What ``additional_config`` says."""
    rank: int = 0
    """Of the tensor-parallel ranks of the first replica."""


@dataclass(frozen=True, kw_only=True)
class FakeEnd:
    """A communicator whose operators are looked at as far as shapes go: nothing is ever moved."""

    rank: int
    ranks: int
    buffer_bytes: int
    chip: str

    def exchange(self, step: Any, pieces: Any, sizes: Any) -> Any:
        """Not reached: an operator reads its data first, and FakeTensors have none."""
        raise AssertionError("FakeTensors were moved")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was found of a rank. Bytes."""

    layers: int
    elements: int
    """Elements of all parameters."""
    weights: int
    derived: int
    """Buffers and tensors made from weights."""
    kv_per_token: int
    activations: dict[str, int]
    """Step → the most bytes that its tensors took at a time."""
    groups: list[str]
    """vLLM's groups whose collectives were called."""
    operators: dict[str, list[int]]
    """torch_npu operator → how often it was called, with how many different shapes."""
    errors: list[str]
    seconds: float


def run(case: Case) -> Outcome:
    """Build the model and take a prefill and a decode step."""
    start = time.perf_counter()
    causal_mask(NPU), no_lse(NPU)  # kept for the process: they must not be made of FakeTensors
    with ExitStack() as stack:
        config = _vllm_config(case)
        stack.enter_context(_groups(case, config))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        watch = Watch()
        model, elements, weights = _build(config, mode)
        derived = _held(model) - weights
        kv = _bind_caches(config, mode)
        peaks = {}
        for step in _steps(case):
            peaks[step.name] = _forward(model, config, case, step, mode, watch)
        return Outcome(
            layers=case.config["num_hidden_layers"],
            elements=elements,
            weights=weights,
            derived=derived,
            kv_per_token=kv,
            activations=peaks,
            groups=sorted(watch.groups),
            operators={name: [count, len(watch.shapes[name])] for name, count in sorted(watch.calls.items())},
            errors=watch.errors,
            seconds=time.perf_counter() - start,
        )


def _vllm_config(case: Case) -> VllmConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        return EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            tensor_parallel_size=case.tensor,
            decode_context_parallel_size=case.context,
            data_parallel_size=case.data,
            enable_expert_parallel=case.expert_parallel,
            dtype="bfloat16",
            max_model_len=case.max_model_len,
            max_num_batched_tokens=case.tokens,
            max_num_seqs=case.requests,
            block_size=BLOCK,
            additional_config=case.options,
        ).create_engine_config()


@contextmanager
def _groups(case: Case, config: VllmConfig) -> Iterator[None]:
    """vLLM's process groups as the case's rank has them. Every backend is ``fake``, and what would be asked of other
    processes (who shares a node, who reads a queue) is answered at once.
    """
    world, new_group = case.tensor * case.data, dist.new_group

    def fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **rest: Any) -> Any:
        return new_group(ranks, backend="fake", **rest)

    torch.npu.set_device(NPU)
    chip = torch.npu.get_device_name()
    buffer_bytes = mc2_group.hccl_buffer_bytes()

    def end(name: str) -> FakeEnd:
        return FakeEnd(rank=case.rank, ranks=world, buffer_bytes=buffer_bytes, chip=chip)

    before = communicator.provide(end)
    if mc2_group.wanted(config, chip):
        mc2_group.remember(
            mc2_group.Opened(name="mc2", rank=case.rank, ranks=world, buffer_bytes=buffer_bytes)
        )
    with (
        set_current_vllm_config(config),
        patch.object(dist, "new_group", fake_group),
        patch.object(parallel_state, "in_the_same_node_as", lambda group, source_rank=0: [True] * world),
        patch.object(MessageQueue, "create_from_process_group", lambda *args, **kwargs: None),
    ):
        dist.init_process_group(backend="fake", store=FakeStore(), rank=case.rank, world_size=world)
        parallel_state.init_distributed_environment(case.tensor, case.rank, "env://", 0, "fake")
        parallel_state.ensure_model_parallel_initialized(case.tensor, 1, 1, case.context)
    try:
        yield
    finally:
        communicator.provide(before)
        mc2_group.forget()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        rotary_embedding._ROPE_DICT.clear()  # modules of FakeTensors, which the next model must not find


def _build(config: VllmConfig, mode: FakeTensorMode) -> tuple[torch.nn.Module, int, int]:
    """The model ready to run; the elements and bytes of its parameters as they are loaded."""
    # The map's text is for a log line; it would be read from FakeTensors.
    unread = patch.object(ExpertMapManager, "get_compressed_map_string", lambda self: "")
    with mode, set_current_vllm_config(config), NPU, set_default_torch_dtype(torch.bfloat16), unread:
        model = initialize_model(config)
        parameters = list(model.parameters())
        elements = sum(x.numel() for x in parameters)
        weights = sum(x.numel() * x.element_size() for x in parameters)
        process_weights_after_loading(model, config.model_config, NPU)
    return model.eval(), elements, weights


def _bind_caches(config: VllmConfig, mode: FakeTensorMode) -> int:
    """Give each layer a cache of the form that vLLM binds; returns the bytes of a token over all layers."""
    total = 0
    for layer in config.compilation_config.static_forward_context.values():
        if not hasattr(layer, "get_kv_cache_spec"):
            continue
        spec = layer.get_kv_cache_spec(config)
        spec = layer.get_attn_backend().customize_spec(spec)
        total += spec.page_size_bytes // spec.block_size
        width = (spec.state_content_bytes or spec.head_size * spec.dtype.itemsize) // spec.dtype.itemsize
        shape = [BLOCKS, BLOCK, width]
        if spec.num_head_slots:
            shape.insert(1, spec.num_head_slots)
        with mode:
            cache = torch.empty(shape, dtype=spec.dtype, device=NPU)
        if hasattr(layer, "layer_name") and layer.layer_name.endswith(".rope"):
            layer.bind_kv_cache(cache.unsqueeze(1))
        else:
            layer.kv_cache = cache
    return total


def _held(model: torch.nn.Module) -> int:
    """Bytes of all that the model keeps: parameters, buffers, tensors of its modules and of their attention
    implementations; the scales and maps of a few numbers left out.
    """
    found = {}
    for module in model.modules():
        kept = [*vars(module).values(), *vars(getattr(module, "impl", None) or object).values()]
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *kept):
            if torch.is_tensor(tensor) and tensor.device.type == "npu":
                storage = tensor.untyped_storage()
                if isinstance(tensor, torch.nn.Parameter) or storage.nbytes() > FEW:
                    found[StorageWeakRef(storage)] = storage.nbytes()
    return sum(found.values())


def _steps(case: Case) -> list[StepSizes]:
    """Prefills of new tokens alone, prefills behind earlier tokens, decodes."""
    half = case.tokens // 2
    earlier = case.max_model_len - half
    return [
        StepSizes(name="prefill", queries=[half, half], computed=[0, 0]),
        StepSizes(name="prefill behind earlier tokens", queries=[half, half], computed=[earlier, earlier]),
        StepSizes(
            name="decode", queries=[1] * case.requests, computed=[case.max_model_len - 1] * case.requests
        ),
    ]


@torch.inference_mode()
def _forward(
    model: torch.nn.Module,
    config: VllmConfig,
    case: Case,
    step: StepSizes,
    mode: FakeTensorMode,
    watch: Watch,
) -> int:
    """Take one step, with the logits of each request's last token; returns the peak of its memory."""
    tokens, requests = step.tokens, len(step.queries)
    made = metadata(config, step, mode, NPU)
    across = torch.full((case.data,), tokens, dtype=torch.int32)
    choices = case.config.get("num_experts_per_tok", 0)
    watch.rows_per_rank = -(-tokens // case.tensor) * choices // (case.tensor * case.data)
    with mode, NPU:
        ids = torch.zeros(tokens, dtype=torch.int32)
        positions = torch.zeros(tokens, dtype=torch.int64)
        last = torch.zeros(requests, dtype=torch.int64)
    with (
        set_current_vllm_config(config),
        set_forward_context(made, config, num_tokens=tokens, num_tokens_across_dp=across),
        mode,
        watch.measuring(),
    ):
        hidden = model(input_ids=ids, positions=positions)
        logits = model.compute_logits(hidden[last])
    expected = [
        (tokens, config.model_config.get_hidden_size()),
        (requests, config.model_config.get_vocab_size()),
    ]
    found = [tuple(hidden.shape), tuple(logits.shape)]
    if found != expected:
        watch.errors.append(f"{step.name}: hidden states and logits are {found}, expected {expected}")
    return watch.peak
