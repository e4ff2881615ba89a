"""KV pages that leave the device and come back through a connector of vLLM's give the same tokens."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from vllm import LLM, SamplingParams

BLOCK = 128


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def llm(tiny_llama: Callable[..., AbstractContextManager[LLM]], storage: Path) -> Iterator[LLM]:
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    with tiny_llama(
        enable_prefix_caching=False,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        num_gpu_blocks_override=32,
        kv_transfer_config=connector,
    ) as engine:
        yield engine


def test_pages_are_stored_and_loaded(llm: LLM, storage: Path) -> None:
    rng = random.Random(3)
    prompts = [
        {"prompt_token_ids": [rng.randrange(3, 128) for _ in range(n)]} for n in (2 * BLOCK + 9, BLOCK + 5)
    ]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    first = llm.generate(prompts, params, use_tqdm=False)
    assert len(list(storage.rglob("*.safetensors"))) == 2 * len(prompts), "one file per layer and prompt"
    # Other prompts in between, so that the pages themselves hold something else.
    llm.generate([{"prompt_token_ids": [i + 3] * 300} for i in range(4)], params, use_tqdm=False)
    again = llm.generate(prompts, params, use_tqdm=False)
    assert [o.num_cached_tokens for o in again] == [2 * BLOCK, BLOCK], "loaded, not computed"
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]
