"""The checkpoints are worth testing with: greedy steps are decided clearly, and each feature changes the
answer.
"""

from __future__ import annotations

import pytest

from .checkpoints import CHECKPOINTS, LATENT_CHECKPOINTS, VOCAB, Checkpoint, build_model
from .reference import greedy, prompts

ALL = (*CHECKPOINTS, *LATENT_CHECKPOINTS)
NAMES = [checkpoint.name for checkpoint in ALL]
MARGIN = 2e-3  # in logits of deviation near 8: far above fp32 rounding (below 1e-4), so no token may differ


@pytest.mark.parametrize("name", NAMES)
def test_greedy_steps_are_decided_clearly(name, references):
    for result in references(name):
        assert result.margin > MARGIN
        assert len(set(result.tokens)) > 8, "an answer that only repeats itself shows nothing"


@pytest.mark.parametrize("checkpoint", [c for c in ALL if c.without], ids=lambda c: c.name)
def test_the_feature_changes_the_answer(checkpoint: Checkpoint, references):
    without = build_model(checkpoint, feature=False)
    long_prompt = prompts(VOCAB)[-1]
    assert greedy(without, long_prompt, 64).tokens != references(checkpoint.name)[-1].tokens
