"""SmolLM2-135M-Instruct, the demo model, against transformers: fp32 tokens, tensor parallel 3, structured
output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from npufleet.cluster import demo_model

from .engines import GRAPHS, engine, greedy, logprob_error, tokens, worker_engine
from .reference import Greedy, load
from .reference import greedy as hf_greedy

STEPS = 64
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a lower temperature on a mountain because the pressure of the air is lower there. " * 5,
)
CAPITAL = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "maximum": 99999999},
    },
    "required": ["city", "population"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def path() -> Path:
    return demo_model.ensure()


@pytest.fixture(scope="module")
def expected(path) -> list[Greedy]:
    """Greedy answers of transformers; one model for all prompts, with its KV cache."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), load(path)
    return [hf_greedy(model, tokenizer(text).input_ids, STEPS) for text in TEXTS]


@pytest.fixture(scope="module")
def llm(path) -> Iterator[LLM]:
    with engine(path, skip_tokenizer_init=False, num_gpu_blocks_override=64, **GRAPHS) as served:
        yield served


def check(outputs, expected: list[Greedy], tolerance: float) -> None:
    assert tokens(outputs) == [result.tokens for result in expected]
    for output, result in zip(outputs, expected, strict=True):
        assert logprob_error(output, result.logprobs) < tolerance


def test_eager_mode_equals_transformers(path, expected):
    """First in this file: leaving an engine ends what another one of this process would still need."""
    with engine(path, num_gpu_blocks_override=64) as eager:
        check(greedy(eager, [result.prompt for result in expected], STEPS, logprobs=3), expected, 2e-3)


def test_graph_mode_equals_transformers(llm, expected):
    check(greedy(llm, [result.prompt for result in expected], STEPS, logprobs=3), expected, 2e-3)


def test_json_schema(llm):
    params = SamplingParams(
        temperature=0.0, max_tokens=96, structured_outputs=StructuredOutputsParams(json=CAPITAL)
    )
    chat = [{"role": "user", "content": "Name the capital of France and its population as JSON."}]
    (output,) = llm.chat([chat], params, use_tqdm=False)
    answer = json.loads(output.outputs[0].text)
    assert set(answer) == {"city", "population"}
    assert isinstance(answer["city"], str) and isinstance(answer["population"], int)


def test_regex_and_choice_beside_free_requests(llm):
    """Constrained and free requests in one batch; the free one answers as if alone."""
    prompt = "The capital of France is"
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex=r" [0-9]{4}")
        ),
        SamplingParams(
            temperature=0.0,
            max_tokens=12,
            structured_outputs=StructuredOutputsParams(choice=["Rome", "Oslo"]),
        ),
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    ]
    number, choice, free = (o.outputs[0].text for o in llm.generate([prompt] * 3, params, use_tqdm=False))
    assert len(number) == 5 and number[1:].isdigit()
    assert choice in ("Rome", "Oslo")
    assert free == llm.generate([prompt], params[2], use_tqdm=False)[0].outputs[0].text
    assert "Paris" in free


def test_stop_string(llm):
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=["Paris"], ignore_eos=True)
    (output,) = llm.generate(["The capital of France is"], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason == "Paris"
    assert "Paris" not in output.outputs[0].text


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, GRAPHS], ids=["eager", "graph"])
def test_tensor_parallel_three(mode, path, expected):
    """Nine heads and three KV heads: one KV head per rank."""
    with worker_engine(path, 3, num_gpu_blocks_override=64, **mode) as parallel:
        outputs = greedy(parallel, [result.prompt for result in expected], STEPS, logprobs=3)
    check(outputs, expected, 5e-3)
