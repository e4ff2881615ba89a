"""A whole engine in this process: a tiny float32 Llama, graphs for batches up to 4, larger ones eager."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import LLM, SamplingParams

from npufleet.kernels.virtual import counters
from npufleet.plugin.attention.layout import paged_kv
from npufleet.plugin.graph import ACLGraphWrapper
from npufleet.plugin.model_runner import NPUModelRunner
from npufleet.plugin.sampler import NPUTopKTopPSampler

BLOCK = 128
Prompt = dict[str, list[int]]


def prompt(length: int, seed: int = 0) -> Prompt:
    rng = random.Random(1000 * length + seed)
    return {"prompt_token_ids": [rng.randrange(3, 128) for _ in range(length)]}


def greedy(tokens: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **changes)


@pytest.fixture(scope="module")
def llm(tiny_llama: Callable[..., AbstractContextManager[LLM]]) -> Iterator[LLM]:
    with tiny_llama(
        max_num_batched_tokens=256,
        max_num_seqs=8,
        num_gpu_blocks_override=64,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def runner(llm: LLM) -> NPUModelRunner:
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def tokens(llm: LLM, prompts: list[Prompt], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


def test_the_engine_runs_our_classes(runner: NPUModelRunner) -> None:
    assert type(runner) is NPUModelRunner
    assert type(runner.model) is ACLGraphWrapper
    assert type(runner.sampler.topk_topp_sampler) is NPUTopKTopPSampler
    assert runner.device.type == "npu"
    assert sorted(d.num_tokens for d in runner.model._graphs) == [1, 2, 4]


def test_a_decode_step_waits_for_nothing_but_its_tokens(llm: LLM) -> None:
    engine, batch = llm.llm_engine, 2
    for i in range(batch):
        engine.add_request(str(i), prompt(9, i), greedy(8))
    engine.step()  # the prompts
    engine.step()
    counters.reset()
    for _ in range(4):
        assert len(engine.step()) == batch
    assert counters.read().syncs == {"stream": 0, "device": 0, "event": 4, "copy_to_host": 0}
    while engine.has_unfinished_requests():
        engine.step()


def test_graphs_give_the_tokens_of_eager_steps(llm: LLM) -> None:
    prompts = [prompt(n) for n in (3, 17, 130)]
    alone = [tokens(llm, [p], greedy(40))[0] for p in prompts]  # graph of batch 1
    padded = tokens(llm, prompts, greedy(40))  # 3 requests in the graph of batch 4
    eager = tokens(llm, prompts + [prompt(5, seed=s) for s in range(5)], greedy(40))[
        :3
    ]  # batch 8 has no graph
    assert alone == padded == eager
    assert len({tuple(x) for x in alone}) == 3


def test_a_chunked_prefill_gives_the_tokens_of_whole_ones(llm: LLM) -> None:
    long = prompt(300)  # more than the 256 tokens of one step
    together = tokens(llm, [prompt(7), long, prompt(200)], greedy())
    assert [tokens(llm, [p], greedy())[0] for p in (prompt(7), long, prompt(200))] == together


def test_a_prefix_cache_hit_gives_the_same_tokens(llm: LLM) -> None:
    shared = prompt(2 * BLOCK + 9, seed=5)
    first = llm.generate([shared], greedy(), use_tqdm=False)[0]
    again = llm.generate([shared], greedy(), use_tqdm=False)[0]
    assert first.num_cached_tokens == 0 and again.num_cached_tokens == 2 * BLOCK
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


def test_sampling_with_a_seed_repeats_and_respects_top_k(llm: LLM) -> None:
    def sample(**changes: Any) -> list[int]:
        params = SamplingParams(max_tokens=16, ignore_eos=True, detokenize=False, **changes)
        return tokens(llm, [prompt(9)], params)[0]

    assert sample(temperature=1.0, seed=7, top_k=20, top_p=0.9) == sample(
        temperature=1.0, seed=7, top_k=20, top_p=0.9
    )
    assert sample(temperature=1.0, seed=7) != sample(temperature=1.0, seed=8)
    assert sample(temperature=2.0, seed=1, top_k=1) == tokens(llm, [prompt(9)], greedy(16))[0]
    assert sample(temperature=2.0, seed=1, top_p=1e-9) == tokens(llm, [prompt(9)], greedy(16))[0]


def test_logprobs_of_the_chosen_token_are_the_largest(llm: LLM) -> None:
    output = llm.generate([prompt(9)], greedy(4, logprobs=3), use_tqdm=False)[0].outputs[0]
    for token, chosen in zip(output.token_ids, output.logprobs, strict=True):
        assert max(chosen, key=lambda t: chosen[t].logprob) == token and chosen[token].rank == 1


def test_pages_hold_keys_then_values(llm: LLM, runner: NPUModelRunner) -> None:
    """The bytes of the first block of a request, recomputed by the first layer's own projection."""
    text = prompt(BLOCK + 3, seed=77)
    blocks: list[int] = []
    add = runner.input_batch.block_table.block_tables[0].add_row

    def remember(ids: list[int], row: int) -> None:
        blocks.extend(ids)
        add(ids, row)

    runner.input_batch.block_table.block_tables[0].add_row = remember
    try:
        tokens(llm, [text], greedy(1))
    finally:
        runner.input_batch.block_table.block_tables[0].add_row = add
    layer = runner.get_model().model.layers[0]
    cache = layer.self_attn.attn.kv_cache
    ids = torch.tensor(text["prompt_token_ids"][:BLOCK]).npu()
    with torch.inference_mode():
        hidden = layer.input_layernorm(runner.get_model().embed_input_ids(ids))
        _, key, value = layer.self_attn.qkv_proj(hidden)[0].split([128, 64, 64], dim=-1)
        positions = torch.arange(BLOCK).npu()
        _, key = layer.self_attn.rotary_emb(positions, torch.zeros(BLOCK, 128).npu(), key.contiguous())
    torch.testing.assert_close(cache[blocks[0], 0].cpu(), key.cpu(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache[blocks[0], 1].cpu(), value.cpu(), rtol=1e-4, atol=1e-4)
    assert paged_kv(cache, 4).step == 2


def test_new_blocks_are_zeroed_whole(runner: NPUModelRunner) -> None:
    cache = runner.get_model().model.layers[1].self_attn.attn.kv_cache
    kept = cache[1:].cpu().clone()
    cache[40:44].fill_(3)
    runner._init_kv_zero_meta()
    runner._zero_block_ids([40, 42])
    runner._zero_block_ids([])
    assert not cache[40].any() and not cache[42].any()
    assert (cache[41] == 3).all() and (cache[43] == 3).all()
    cache[40:44].zero_()
    assert torch.equal(cache[1:39].cpu(), kept[:38])


class Reads(TorchDispatchMode):
    """Names of the operations that make the host read the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        from_npu = any(isinstance(a, torch.Tensor) and a.device.type == "npu" for a in args)
        to_host = name == "_to_copy" and str(kwargs.get("device")) == "cpu" and from_npu
        into_host = name == "copy_" and args[0].device.type == "cpu" and args[1].device.type == "npu"
        if to_host or into_host or (from_npu and name in ("_local_scalar_dense", "nonzero", "equal")):
            self.seen.append(f"{name} {kwargs.get('non_blocking')}")
        return func(*args, **kwargs)


@pytest.mark.parametrize("requests", [1, 3, 6], ids=["graph", "padded graph", "eager"])
def test_a_decode_step_reads_only_the_sampled_tokens(llm: LLM, runner: NPUModelRunner, requests: int) -> None:
    step, counts = runner.execute_model, []

    def watched(scheduled: Any, *args: Any) -> Any:
        with Reads() as reads:
            result = step(scheduled, *args)
        if scheduled.total_num_scheduled_tokens == requests and not scheduled.scheduled_new_reqs:
            counts.append(reads.seen)
        return result

    runner.execute_model = watched
    try:
        tokens(llm, [prompt(5, seed=s) for s in range(requests)], greedy(6))
    finally:
        del runner.execute_model
    assert len(counts) >= 5 and not any(counts), "a decode step's model part waits for nothing"
