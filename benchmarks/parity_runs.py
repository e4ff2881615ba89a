"""What the parity table asks of engines, and how their answers are judged; see parity.py, which runs it.

Each engine answers for as many columns as it can. A run yields its cells as soon as an engine has answered, so that
a crash loses no finished cell.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.logprobs import FlatLogprobs

from npufleet.kernels.virtual import counters
from tests.parity.checkpoints import VOCAB
from tests.parity.engines import (
    GRAPHS,
    SMALL,
    cached,
    engine,
    generate,
    greedy,
    logprob_error,
    tokens,
    worker_engine,
)
from tests.parity.reference import Greedy, load, prompts
from tests.parity.replicas import REPLICAS, run_replicas

STEPS = 64
TOLERANCE = 2e-3  # log probabilities in fp32; the logits have a deviation near 8
MEAN_FACTOR, MAX_FACTOR = 1.5, 3.0  # bf16 errors may be this many times those of transformers in bf16
WHOLE = {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
SPREAD = {"enable_expert_parallel": True}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One answer: ``yes``, ``no``, ``n/a`` (there is nothing to compare) or ``refused`` (by name, before start)."""

    value: str
    detail: str = ""


Cells = dict[str, Cell]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A checkpoint, and what transformers makes of it."""

    path: Path
    expected: list[Greedy]

    @property
    def answers(self) -> list[tuple[int, ...]]:
        """The tokens of transformers in fp32."""
        return [result.tokens for result in self.expected]


Run = Callable[[Family], Iterator[Cells]]


def judge(family: Family, outputs: Sequence[Any]) -> Cell:
    """Yes if every token equals that of transformers and no log probability is farther away than the tolerance."""
    for index, (found, right) in enumerate(zip(tokens(outputs), family.answers, strict=True)):
        if found != right:
            step = next(i for i, pair in enumerate(zip(found, right, strict=True)) if pair[0] != pair[1])
            return Cell(value="no", detail=f"prompt {index} differs from token {step} on")
    if outputs[0].outputs[0].logprobs is None:
        return Cell(value="yes")
    errors = [logprob_error(o, e.logprobs) for o, e in zip(outputs, family.expected, strict=True)]
    return Cell(
        value="yes" if max(errors) < TOLERANCE else "no", detail=f"log probabilities within {max(errors):.0e}"
    )


def one_rank(family: Family) -> Iterator[Cells]:
    """An eager engine that prefills whole prompts without a prefix cache, then one with everything on."""
    with engine(family.path, **WHOLE) as llm:
        counters.reset()
        plain = greedy(llm, prompts(VOCAB), STEPS, logprobs=5)
        plain_calls = counters.read().calls
    yield {"fp32": judge(family, plain)}
    with engine(family.path, **GRAPHS) as llm:
        counters.reset()
        first = greedy(llm, prompts(VOCAB), STEPS, logprobs=5)
        calls = counters.read().calls
        again = greedy(llm, prompts(VOCAB), STEPS, logprobs=5)
    same = tokens(first) == tokens(plain) and calls < plain_calls
    hit, found = judge(family, again), sum(cached(again))
    yield {
        "graph = eager": Cell(
            value="yes" if same else "no", detail=f"{plain_calls} device calls eager, {calls} with graphs"
        ),
        "chunked": judge(family, first),
        "prefix cache": Cell(value=hit.value if found else "no", detail=f"{found} tokens; {hit.detail}"),
    }


@torch.inference_mode()
def all_logits(path: Path, sequences: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """Logits of transformers after each token of the sequences but the last: [tokens, vocab] fp32."""
    model = load(path, dtype)
    return torch.cat([model(torch.tensor([sequence])).logits[0, :-1].float() for sequence in sequences])


def bfloat16(family: Family) -> Iterator[Cells]:
    """All logits of fixed sequences (prompt and fp32 answer), against those in fp32."""
    sequences = [[*result.prompt, *result.tokens] for result in family.expected]
    settings = {"dtype": "bfloat16", "logprobs_mode": "raw_logits", "max_logprobs": VOCAB, **GRAPHS}
    params = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=VOCAB, flat_logprobs=True, detokenize=False
    )
    with engine(family.path, **settings) as llm:
        outputs = generate(llm, sequences, params)
    rows = []
    for output in outputs:
        flat = output.prompt_logprobs
        assert isinstance(flat, FlatLogprobs)
        for start, end in list(zip(flat.start_indices, flat.end_indices, strict=True))[1:]:
            row = torch.full((VOCAB,), torch.nan)
            row[torch.tensor(flat.token_ids[start:end])] = torch.tensor(flat.logprobs[start:end])
            rows.append(row)
    exact = all_logits(family.path, sequences, torch.float32)
    ours = (torch.stack(rows) - exact).abs()
    theirs = (all_logits(family.path, sequences, torch.bfloat16) - exact).abs()
    good = bool(ours.mean() < MEAN_FACTOR * theirs.mean() and ours.max() < MAX_FACTOR * theirs.max())
    detail = f"max {ours.max():.2f} ({theirs.max():.2f}), mean {ours.mean():.3f} ({theirs.mean():.3f})"
    yield {"bf16": Cell(value="yes" if good else "no", detail=detail)}


def over_two_ranks(column: str, **settings: Any) -> Run:
    """Two worker processes, graphs, steps of 64 tokens."""

    def run(family: Family) -> Iterator[Cells]:
        with worker_engine(family.path, 2, **GRAPHS, **settings) as llm:
            yield {column: judge(family, greedy(llm, prompts(VOCAB), STEPS, logprobs=5))}

    return run


def over_context(path: Path) -> dict[str, Any]:
    """Tensor parallel of two; of four for key heads of more than one, which two ranks would split: a cache is spread
    over ranks that hold the same heads.
    """
    model = EngineArgs(model=str(path), skip_tokenizer_init=True).create_model_config()
    ranks = 2 if model.use_mla or model.get_total_num_kv_heads() == 1 else 4
    return {"tensor_parallel_size": ranks, "decode_context_parallel_size": 2}


def spread_cache(family: Family) -> Iterator[Cells]:
    """Worker processes that share the KV cache of each sequence by twos."""
    settings = over_context(family.path)
    with worker_engine(family.path, settings["tensor_parallel_size"], **GRAPHS, **settings) as llm:
        yield {"DCP2": judge(family, greedy(llm, prompts(VOCAB), STEPS, logprobs=5))}


def between_replicas(family: Family) -> Iterator[Cells]:
    """Two replicas with half of the prompts each, then the first alone."""
    found = run_replicas(family.path, STEPS, {**GRAPHS, **SPREAD})
    shares = all(found[rank][0] == family.answers[rank::REPLICAS] for rank in range(REPLICAS))
    detail = "tokens differ" if not shares else "tokens differ when one replica has no work"
    good = shares and found[0][1] == family.answers[2]
    yield {"DPxEP": Cell(value="yes") if good else Cell(value="no", detail=detail)}


PIPELINE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
Settings = dict[str, Any] | Callable[[Path], dict[str, Any]]
RUNS: tuple[tuple[tuple[str, ...], Settings, Run], ...] = (
    (("fp32", "graph = eager", "chunked", "prefix cache"), GRAPHS, one_rank),
    (("bf16",), {"dtype": "bfloat16", **GRAPHS}, bfloat16),
    (("TP2",), {"tensor_parallel_size": 2}, over_two_ranks("TP2")),
    (("DCP2",), over_context, spread_cache),
    (("PP2",), PIPELINE, over_two_ranks("PP2", **PIPELINE)),
    (("EP2",), {"tensor_parallel_size": 2, **SPREAD}, over_two_ranks("EP2", **SPREAD)),
    (("DPxEP",), {"data_parallel_size": 2, **SPREAD}, between_replicas),
)
"""Columns, what an engine for them is asked for, and the run that answers."""


def refusal(path: Path, asked: Settings) -> Cell | None:
    """What vLLM or the plugin says against an engine of these settings before anything starts; None: nothing."""
    settings = asked(path) if callable(asked) else asked
    given = {"model": str(path), "distributed_executor_backend": "mp", **SMALL, **settings}
    try:
        EngineArgs(**given).create_engine_config()
    except ValueError as error:  # of pydantic's the second line holds the message
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = next((line for line in lines if "validation error" not in line), lines[0])
        said = said.removeprefix("Value error, ").split(" [type=")[0]
        experts = EngineArgs(model=str(path), skip_tokenizer_init=True).create_model_config().is_moe
        spread = settings.get("enable_expert_parallel", False)
        return Cell(value="n/a" if spread and not experts else "refused", detail=said)
    return None
