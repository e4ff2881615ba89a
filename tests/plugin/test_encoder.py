"""An encoder-only model: attention without a cache and without a mask, against transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import BertModel, PreTrainedTokenizerFast
from vllm import LLM


def test_embeddings_are_those_of_transformers(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    torch.manual_seed(0)
    config = BertModel.config_class.from_pretrained(checkpoint("bert"))
    reference = BertModel(config).eval()
    reference.save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path)
    llm = LLM(
        model=str(tmp_path),
        runner="pooling",
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        gpu_memory_utilization=0.05,
    )
    prompts = [[5, 6, 7, 8, 9], [10, 20, 30], [3]]
    outputs = llm.embed([{"prompt_token_ids": p} for p in prompts], use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    for given, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            first = reference(torch.tensor([given])).last_hidden_state[0, 0]
        wanted = torch.nn.functional.normalize(first, dim=-1)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), wanted, rtol=1e-4, atol=1e-5)
