"""A fleet with everything but models: real Ray, Serve, controller, router and gateway over engines that make up
their answers. Started as a process of its own: ``python -m tests.e2e.hollow FOLDER CONFIG.json``, or
``… join ADDRESS CONFIG.json``, which begins it on a Ray cluster and leaves it there.

An engine argument of a model sets how its engines behave: ``seed`` is added to each token of the answers, so that
generations can be told apart; ``max_num_seqs`` 13 refuses to start, 14 fails at each start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from npufleet.cluster import config as fleet_config
from npufleet.cluster import serve
from npufleet.cluster.app import assemble, submit
from npufleet.cluster.config import ModelConfig
from npufleet.cluster.deploy.wish import Wish
from npufleet.cluster.device import Device
from npufleet.cluster.placement.plan import Plan
from npufleet.cluster.targets import Target
from tests.fakes.async_llm import FakeAsyncLLM
from tests.fakes.tokenizer import MAX_MODEL_LEN

TOKEN_S = 0.02
REFUSED, FAILING = 13, 14


class HollowLLM(FakeAsyncLLM):
    """Streams ``seed + n`` as the n-th token of every answer."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.seed = int(model.engine.get("seed", 0))
        self.model_config = SimpleNamespace(
            max_logprobs=20, tokenizer=model.source, max_model_len=MAX_MODEL_LEN, served_model_name=model.name,
            model=model.source, is_multimodal_model=False, runner_type="generate", hf_config=SimpleNamespace(),
            get_vocab_size=lambda: 260, get_diff_sampling_param=dict, generation_config="vllm",
        )  # fmt: skip
        self.vllm_config.model_config = self.model_config

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> AsyncIterator[RequestOutput]:
        count = sampling_params.max_tokens or 3
        ids = [self.seed + n % 50 for n in range(count)]
        for index in range(count):
            await asyncio.sleep(TOKEN_S)
            last = index == count - 1
            if sampling_params.output_kind is RequestOutputKind.DELTA:
                yield self._output(request_id, ids[index : index + 1], last, sampling_params)
            elif last:
                yield self._output(request_id, ids, True, sampling_params)

    def shutdown(self) -> None:
        """Nothing to end."""


async def factory(model: ModelConfig, plan: Plan, group: Any) -> HollowLLM:
    """Make an engine's LLM, or fail as the model's arguments ask for."""
    await asyncio.sleep(0.5)
    if model.engine.get("max_num_seqs") == REFUSED:
        raise ValueError("13 sequences bring no luck")
    if model.engine.get("max_num_seqs") == FAILING:
        raise MemoryError("14 sequences are too many")
    return HollowLLM(model)


@dataclass(kw_only=True)
class HollowFleet(serve._Fleet):
    """`npufleet serve` with that factory."""

    def _submit(self) -> None:
        from ray import serve as ray_serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        ray_serve.start(proxy_location="Disabled")
        submit(assemble(Wish.of(self.config), factory, secret=self.secret))


def main(folder: Path, config_file: Path) -> None:
    """Serve until SIGINT or SIGTERM."""
    made = fleet_config.from_dict(json.loads(config_file.read_text()))
    device = Device(kind="virtual", count=6, chip="Ascend910B3")
    fleet = HollowFleet(config=made, console=serve.Console(), stop=serve._Stop())
    try:
        fleet.start(Target(config=made, device=device, question=None, expect=None), None)
        (folder / "ready").touch()
        fleet.keep()
    except serve.Stopped:
        pass
    finally:
        fleet.end(keep_logs=False)


def join(address: str, config_file: Path) -> None:
    """Begin the fleet on the Ray cluster at ``address``."""
    import ray
    from ray import serve as ray_serve

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    ray_serve.start(proxy_location="Disabled")
    submit(assemble(Wish.of(fleet_config.from_dict(json.loads(config_file.read_text()))), factory))
    ray.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "join":
        join(sys.argv[2], Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
