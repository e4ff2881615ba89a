"""Sampling on an NPU: seeds, truncation, penalties, log probabilities and preemption, against transformers
in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams

from .checkpoints import VOCAB
from .engines import GRAPHS, engine, generate, greedy, tokens
from .reference import greedy as hf_greedy
from .reference import load, prompts, token_logprobs

NAME = "qwen2"
STEPS = 32


@pytest.fixture(scope="module")
def llm(checkpoint_path) -> Iterator[LLM]:
    with engine(checkpoint_path(NAME), **GRAPHS) as served:
        yield served


@pytest.fixture(scope="module")
def model(checkpoint_path) -> PreTrainedModel:
    return load(checkpoint_path(NAME))


def sampling(**settings) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": STEPS, "ignore_eos": True, **settings})


@torch.inference_mode()
def next_logits(model: PreTrainedModel, prompt: list[int], answer: tuple[int, ...]) -> torch.Tensor:
    """Logits [len(answer), vocab] that transformers gives for each token of the answer."""
    sequence = [*prompt, *answer[:-1]]
    return model(torch.tensor([sequence])).logits[0, len(prompt) - 1 :]


def test_a_seed_decides_the_answer_alone_and_in_a_batch(llm):
    batch = prompts(VOCAB)
    seeded = [sampling(seed=100 + index) for index in range(len(batch))]
    together = tokens(generate(llm, batch, seeded))
    alone = [tokens(generate(llm, [prompt], params))[0] for prompt, params in zip(batch, seeded, strict=True)]
    assert together == alone
    assert tokens(generate(llm, batch, [sampling(seed=7) for _ in batch])) != together


def test_unseeded_requests_differ(llm):
    answers = tokens(generate(llm, [prompts(VOCAB)[1]] * 4, sampling()))
    assert len(set(answers)) > 1


def test_top_k_keeps_to_the_k_best(llm, model):
    prompt = prompts(VOCAB)[2]
    (answer,) = tokens(generate(llm, [prompt], sampling(top_k=3, temperature=2.0, seed=1)))
    logits = next_logits(model, prompt, answer)
    best = logits.topk(3).indices
    assert all(token in row for token, row in zip(answer, best.tolist(), strict=True))
    assert answer != tuple(logits.argmax(-1).tolist()), (
        "at temperature 2 some choice must not be the best one"
    )


def test_top_p_keeps_to_the_nucleus(llm, model):
    prompt, temperature, top_p = prompts(VOCAB)[2], 2.0, 0.5
    (answer,) = tokens(generate(llm, [prompt], sampling(top_p=top_p, temperature=temperature, seed=2)))
    probabilities = (next_logits(model, prompt, answer) / temperature).softmax(-1)
    for token, row in zip(answer, probabilities, strict=True):
        better = row[row > row[token]].sum()
        assert better < top_p + 1e-4, "a token outside the nucleus was drawn"


def test_top_k_and_top_p_differ_within_one_batch(llm):
    """Greedy, top-k 1 and free requests share a step; the first two must give the greedy answer."""
    batch = [prompts(VOCAB)[1]] * 3
    params = [sampling(temperature=0.0), sampling(top_k=1, seed=3), sampling(seed=3, temperature=2.0)]
    first, second, third = tokens(generate(llm, batch, params))
    assert first == second != third


def penalised(logits: torch.Tensor, prompt: list[int], answer: list[int], **penalty: float) -> torch.Tensor:
    """The penalties by definition: repetition over prompt and answer, the others over the answer."""
    logits = logits.clone()
    seen = torch.tensor(sorted({*prompt, *answer}))
    factor = penalty.get("repetition_penalty", 1.0)
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    counts = torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=len(logits)).float()
    logits -= penalty.get("frequency_penalty", 0.0) * counts
    return logits - penalty.get("presence_penalty", 0.0) * (counts > 0)


@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    ],
    ids=lambda penalty: "+".join(penalty),
)
def test_penalties(llm, model, penalty):
    prompt = prompts(VOCAB)[2]
    (answer,) = tokens(generate(llm, [prompt], sampling(temperature=0.0, **penalty)))
    logits = next_logits(model, prompt, answer)
    expected = [
        int(penalised(logits[step], prompt, list(answer[:step]), **penalty).argmax())
        for step in range(len(answer))
    ]
    assert list(answer) == expected
    assert answer != tokens(greedy(llm, [prompt], STEPS))[0], "the penalty was expected to change the answer"


def test_logit_bias_and_stop_token(llm):
    prompt = prompts(VOCAB)[1]
    (free,) = tokens(greedy(llm, [prompt], STEPS))
    (output,) = generate(llm, [prompt], sampling(temperature=0.0, stop_token_ids=[free[5]]))
    assert output.outputs[0].token_ids == list(free[: free.index(free[5]) + 1])
    assert output.outputs[0].finish_reason == "stop"
    (biased,) = tokens(generate(llm, [prompt], sampling(temperature=0.0, logit_bias={free[0]: -100.0})))
    assert biased[0] != free[0]


def test_prompt_logprobs(llm, model):
    """A long prompt in chunks, scored token by token."""
    prompt = prompts(VOCAB)[-1]
    (output,) = generate(llm, [prompt], sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    scores = [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    assert (torch.tensor(scores) - token_logprobs(model, prompt)).abs().max() < 2e-3


def test_several_answers_to_one_prompt(llm):
    (output,) = generate(llm, [prompts(VOCAB)[1]], sampling(n=3, seed=5))
    answers = {tuple(answer.token_ids) for answer in output.outputs}
    assert len(output.outputs) == 3 and len(answers) == 3


@pytest.mark.parametrize("mode", [{}, GRAPHS], ids=["eager", "graph"])
def test_preempted_requests_answer_the_same(mode, checkpoint_path, model, monkeypatch: pytest.MonkeyPatch):
    """Fewer KV blocks than the batch needs: vLLM drops a request and computes it again.

    Each prompt fits in one block and outgrows it while decoding; there are blocks for two to do so.
    """
    batch = prompts(VOCAB, lengths=(100, 110, 115, 120))
    with engine(checkpoint_path(NAME), num_gpu_blocks_override=7, max_model_len=256, **mode) as tight:
        scheduler = tight.llm_engine.engine_core.engine_core.scheduler
        preempt, preempted = scheduler._preempt_request, []

        def watched(request, *args, **kwargs):
            preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        monkeypatch.setattr(scheduler, "_preempt_request", watched)
        outputs = greedy(tight, batch, STEPS)
    assert preempted, "the batch was meant not to fit"
    assert tokens(outputs) == [hf_greedy(model, prompt, STEPS).tokens for prompt in batch]
