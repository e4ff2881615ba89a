"""The oracle: greedy decoding by Hugging Face transformers on the CPU in fp32, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

PROMPT_LENGTHS = (1, 7, 33, 130, 300)  # a KV block holds 128 tokens


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """A prompt, the tokens that greedy decoding adds, and the logits that chose each of them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: torch.Tensor  # [len(tokens), vocab] fp32

    @property
    def logprobs(self) -> torch.Tensor:
        """Log probabilities [len(tokens), vocab] fp32."""
        return self.logits.log_softmax(-1)

    @property
    def margin(self) -> float:
        """The smallest distance between the two largest logits over all steps."""
        top = self.logits.topk(2).values
        return float((top[:, 0] - top[:, 1]).min())


def load(path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a checkpoint folder on the CPU with eager attention."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def prompts(vocab: int, lengths: Sequence[int] = PROMPT_LENGTHS, seed: int = 7) -> list[list[int]]:
    """Random prompts of the given lengths over ids that are not special."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=draw).tolist() for length in lengths]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Sequence[int], steps: int) -> Greedy:
    """Decode ``steps`` tokens, and compute the whole sequence once more without a cache.

    Each position sees only those before it, so that one pass gives the logits of all steps, and nothing that a cache
    could get wrong: AssertionError where it would have chosen another token.
    """
    sequence = list(prompt)
    cache = DynamicCache(config=model.config)
    for step in range(steps):
        fresh = sequence[-1:] if step else sequence
        result = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
        sequence.append(int(result.logits[0, -1].argmax()))
    logits = model(torch.tensor([sequence[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :].float()
    chosen = tuple(sequence[len(prompt) :])
    assert tuple(logits.argmax(-1).tolist()) == chosen, (
        "transformers chooses other tokens with a cache than without"
    )
    return Greedy(prompt=tuple(prompt), tokens=chosen, logits=logits)


@torch.inference_mode()
def token_logprobs(model: PreTrainedModel, sequence: Sequence[int]) -> torch.Tensor:
    """Log probability of each token of ``sequence`` but the first, given those before it: [len - 1] fp32."""
    logits = model(torch.tensor([list(sequence)])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0]
