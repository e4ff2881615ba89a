"""Fixtures of the parity tests: checkpoints and references are made once per session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported; a failed test shows enough

from vllm import LLM

from .checkpoints import BY_NAME, VOCAB, write
from .engines import cached, logprob_error, tokens
from .engines import greedy as npu_greedy
from .reference import Greedy, greedy, load, prompts

STEPS = 64
LOGPROB_TOLERANCE = 2e-3  # fp32 on both sides; logits have a deviation near 8
BFLOAT16_ROWS = pytest.StashKey[list[tuple[str, float, float, float, float]]]()


def in_both_modes(names: Iterable[str], eager: Iterable[str]) -> list[ParameterSet]:
    """(name, mode) of each checkpoint: graph mode, whose prefills are eager too; eager decode of the checkpoints
    that ``eager`` does not name is for the slow run.
    """
    return [
        pytest.param((name, mode), id=f"{name}-{mode}", marks=[pytest.mark.slow] if late else [])
        for name in names
        for mode in ("eager", "graph")
        for late in (mode == "eager" and name not in eager,)
    ]


def assert_answers_twice(llm: LLM, expected: Sequence[Greedy], block: int = 128) -> None:
    """The standard prompts give the reference's tokens and log probabilities, and the same from the prefix cache, which
    holds whole blocks of ``block`` tokens.
    """
    first = npu_greedy(llm, prompts(VOCAB), STEPS, logprobs=5)
    again = npu_greedy(llm, prompts(VOCAB), STEPS)
    assert tokens(first) == [result.tokens for result in expected]
    for output, result in zip(first, expected, strict=True):
        assert logprob_error(output, result.logprobs) < LOGPROB_TOLERANCE
    assert cached(again)[-2:] == [(130 - 1) // block * block, (300 - 1) // block * block]
    assert tokens(again) == tokens(first)


@pytest.fixture(scope="session")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a checkpoint to its folder."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda name: write(BY_NAME[name], folder)


@pytest.fixture(scope="session")
def references(checkpoint_path: Callable[[str], Path]) -> Callable[[str], list[Greedy]]:
    """Name of a checkpoint to greedy decoding of the standard prompts by transformers in fp32."""

    @cache
    def decode(name: str) -> list[Greedy]:
        model = load(checkpoint_path(name))
        return [greedy(model, prompt, STEPS) for prompt in prompts(VOCAB)]

    return decode


@pytest.fixture
def bfloat16_table(request: pytest.FixtureRequest) -> list[tuple[str, float, float, float, float]]:
    """Rows (checkpoint, our mean and largest error, those of transformers) of the run's summary."""
    return request.config.stash.setdefault(BFLOAT16_ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the bfloat16 errors at the end of a run that measured them."""
    rows = config.stash.get(BFLOAT16_ROWS, [])
    if not rows:
        return
    terminalreporter.section("bfloat16: error of token log probabilities against fp32")
    terminalreporter.write_line(
        f"{'checkpoint':<14}{'npu mean':>10}{'npu max':>10}{'hf mean':>10}{'hf max':>10}"
    )
    for name, *errors in rows:
        terminalreporter.write_line(f"{name:<14}" + "".join(f"{error:>10.4f}" for error in errors))
