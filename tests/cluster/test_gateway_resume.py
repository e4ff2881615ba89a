"""The gateway's own streams that break and go on elsewhere: the frontend sees one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import pytest
from vllm.exceptions import VLLMError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput

from npufleet.cluster.gateway.metrics import GatewayMetrics
from npufleet.cluster.gateway.settings import GatewaySettings
from npufleet.cluster.gateway.transport import GrpcEngineCore
from npufleet.cluster.proto.features import advertise
from npufleet.cluster.router import member

from .router_fakes import MODEL, QUICK, Fleet, fleet, until
from .test_gateway_translate import EOS as FRONTEND_EOS
from .test_gateway_translate import core_request
from .test_router_resume import LENGTH, PROMPT, Chain, engines, idle, lose_the_link, positions, ready, resumed

Code = grpc.StatusCode


class Gateway:
    """The gateway's engine core over fakes, and what it told the frontend."""

    def __init__(self, f: Fleet, core: GrpcEngineCore) -> None:
        self.fleet = f
        self.core = core
        self.errors: list[VLLMError] = []
        self.restarts = 0
        core.attach(lambda request_id, error: self.errors.append(error), self._restart)

    def _restart(self, request) -> None:
        self.restarts += 1

    async def ask(self, *breaks: int | str, **params) -> list[EngineCoreOutput]:
        """The outputs of one request whose stream breaks so; ends with its last output or its error."""
        await ready(self.fleet)
        for engine in self.fleet.engines:
            engine.seen.clear()
        self.errors.clear()
        self.fleet.engines[0].breaks[:] = positions(*breaks)
        made = SamplingParams(
            **{"temperature": 0.0, "max_tokens": LENGTH, "output_kind": RequestOutputKind.DELTA, **params}
        )
        await self.core.add_request_async(core_request(made, list(PROMPT)))
        outputs: list[EngineCoreOutput] = []
        await until(lambda: self.core.active == 0)
        while self.core._outputs:
            outputs += (await self.core.get_output_async()).outputs
        return outputs


@asynccontextmanager
async def gateway(*chains: Chain, own: GatewaySettings | None = None, **settings) -> AsyncIterator[Gateway]:
    async with fleet(*chains, settings=replace(QUICK, **settings)) as f:
        core = GrpcEngineCore(
            MODEL, f.router.picker, own or GatewaySettings(), GatewayMetrics(), max_model_len=4096
        )
        try:
            yield Gateway(f, core)
        finally:
            core.shutdown()


@pytest.fixture(autouse=True)
def believed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are lost again and again are picked again without the pause that grows."""
    monkeypatch.setattr(member, "_LONGEST_HOLD", 0.05)


def told(outputs: list[EngineCoreOutput]) -> tuple:
    """What the frontend makes an answer and its usage of."""
    last = outputs[-1]
    assert all(output.finish_reason is None for output in outputs[:-1])
    stats = [output.prefill_stats for output in outputs if output.prefill_stats is not None]
    assert len(stats) == 1 and outputs[0].prefill_stats is stats[0], "the prompt is told once"
    return (
        [token for output in outputs for token in output.new_token_ids],
        (last.finish_reason, last.stop_reason),
        (stats[0].num_prompt_tokens, stats[0].num_cached_tokens),
    )


@pytest.mark.parametrize(
    ("engine", "params"),
    [
        ({}, {"min_tokens": 3}),
        ({"end": (9, FRONTEND_EOS), "eos": (FRONTEND_EOS,)}, {}),
        ({"end": (9, FRONTEND_EOS), "eos": (FRONTEND_EOS,)}, {"ignore_eos": True}),
        ({"end": (9, 77)}, {"stop_token_ids": [77]}),
    ],
)
async def test_a_stream_broken_at_any_token_is_the_unbroken_one(engine: dict, params: dict):
    async with gateway(*engines(2, **engine)) as g:
        whole = told(await g.ask(**params))
        for where in (*range(1, len(whole[0])), "end", "status"):
            assert told(await g.ask(where, **params)) == whole, where
            assert not g.errors and not g.restarts
        assert resumed(g.fleet, "resumed") == len(whole[0]) - 1 and resumed(g.fleet, "ended") == 1
        await idle(g.fleet)


async def test_two_losses_and_one_before_the_next_token():
    async with gateway(*engines(3)) as g:
        whole = told(await g.ask())
        for breaks in [(2, 5), (3, 3), (4, "end")]:
            assert told(await g.ask(*breaks)) == whole
        assert not g.errors


async def test_log_probabilities_go_on_with_their_tokens():
    async with gateway(*engines(2)) as g:
        values = []
        for breaks in [(), (3,)]:
            outputs = await g.ask(*breaks, logprobs=0)
            values.append([row for output in outputs for row in output.new_logprobs.logprobs.tolist()])
        assert values[0] == values[1] and len(values[0]) == LENGTH


@pytest.mark.parametrize(
    ("params", "settings", "why"),
    [
        ({"temperature": 1.0}, {}, "its tokens are drawn"),
        ({"temperature": 1.0, "seed": 3}, {"resume": "all"}, "a seed binds its draws"),
        ({"presence_penalty": 1.0}, {}, "presence and frequency"),
    ],
)
async def test_what_cannot_go_on_keeps_its_error_with_the_reason(params: dict, settings: dict, why: str):
    async with gateway(*engines(2), **settings) as g:
        await g.ask(2, **params)
        assert "the engine was lost after 2 tokens of this answer (UNAVAILABLE)" in str(g.errors[0])
        assert why in str(g.errors[0]) and str(g.errors[0]).endswith("; send the request again")
        assert resumed(g.fleet, "refused") == 1 and sum(g.fleet.served()) == 1


async def test_switched_off_it_is_the_error_of_before():
    async with gateway(*engines(2), resume="off") as g:
        await g.ask(2)
        assert str(g.errors[0]) == (
            "the engine was lost after 2 tokens of this answer (UNAVAILABLE); send the request again"
        )


async def test_without_another_engine_it_says_so():
    async with gateway(*engines(1)) as g:
        await g.ask(2)
        assert "after 2 tokens of this answer (UNAVAILABLE) and no other went on, because" in str(g.errors[0])
        assert resumed(g.fleet, "failed") == 1


async def test_a_stream_whose_engine_goes_silent_goes_on():
    own = GatewaySettings(token_gap_timeout=0.5)
    async with gateway(*engines(2), own=own) as g:
        whole = told(await g.ask())
        assert told(await g.ask(-3)) == whole and not g.errors
        assert resumed(g.fleet, "resumed") == 1
        await idle(g.fleet)


async def test_a_client_that_leaves_in_the_seam_ends_the_new_engines_work():
    async with gateway(*engines(2, hangs_after=0)) as g:
        asking = asyncio.create_task(g.ask(2))
        await until(lambda: sum(g.fleet.served()) == 2 and any(e.running for e in g.fleet.engines))
        await g.core.abort_requests_async(["r"])
        await asking
        await idle(g.fleet)
        assert not g.errors
        assert resumed(g.fleet, "failed") == 1


@dataclass(eq=False)
class Telling(Chain):
    """Tells its features."""

    offered: tuple[tuple[str, str | bytes], ...] = ()

    async def GetModelInfo(self, request, context):
        await context.send_initial_metadata(self.offered)
        return await super().GetModelInfo(request, context)


async def test_an_engine_that_came_back_with_other_features_is_asked_again():
    async with gateway(Telling(name="a")) as g:
        (engine,), (one,) = g.fleet.engines, g.fleet.router.picker.pool.members()
        await ready(g.fleet)
        await g.ask(bad_words=["x"])
        assert "bad_words cannot be used" in str(g.errors[0])
        await engine.stop()
        await until(lambda: not one.pickable)
        engine.offered = advertise({})
        await engine.start()
        await ready(g.fleet)
        assert await g.ask(bad_words=["x"]) and not g.errors


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
@pytest.mark.parametrize("how", ["stuck", "left"])
@pytest.mark.parametrize("after", [0, 3])
async def test_a_request_whose_link_the_router_closes_goes_on(how: str, transport: str, after: int):
    async with gateway(*engines(2), transport=transport, leave_timeout=0.1) as g:
        whole = told(await g.ask())
        asking = asyncio.create_task(g.ask(-after))
        await until(lambda: g.core.active == 1 and not g.fleet.engines[0].breaks)
        await until(lambda: [job.tokens for job in g.core._jobs.values()] == [after])
        lose_the_link(g.fleet, how)
        assert told(await asking) == whole and not g.errors
        assert resumed(g.fleet, "resumed") == bool(after)


@dataclass(eq=False)
class Unending(Chain):
    """Never tells the status of an answer."""

    async def _break_at(self, where: int | str, context) -> None:
        if where == "status":
            await asyncio.Event().wait()


async def test_an_answer_is_whole_whether_its_status_comes_or_not():
    own = GatewaySettings(token_gap_timeout=0.5)
    async with gateway(Unending(name="a"), own=own) as g:
        for temperature in (0.0, 1.0):
            outputs = await g.ask(temperature=temperature)
            assert len([each for each in outputs if each.finish_reason is not None]) == 1 and not g.errors
        assert not any(resumed(g.fleet, outcome) for outcome in ("resumed", "ended", "refused", "failed"))


@dataclass(eq=False)
class Unwilling(Chain):
    """Takes no prompt that is longer than the first one."""

    async def _break_at(self, where: int | str, context) -> None:
        if len(self.seen[-1].tokenized.input_ids) > len(PROMPT):
            await context.abort(Code.INVALID_ARGUMENT, "that prompt is too long")
        await super()._break_at(where, context)


async def test_an_engine_that_will_not_go_on_is_the_reason_not_the_error():
    breaks: list[int | str] = []
    async with gateway(*(Unwilling(name=name, breaks=breaks) for name in "ab")) as g:
        await g.ask(2)
        assert "the engine was lost after 2 tokens of this answer (UNAVAILABLE)" in str(g.errors[0])
        assert "because that prompt is too long" in str(g.errors[0])
        assert resumed(g.fleet, "failed") == 1


async def test_an_answer_in_one_piece_begins_anew_without_what_nobody_has_read():
    params = {"output_kind": RequestOutputKind.FINAL_ONLY, "stop": ["z"], "detokenize": True}
    async with gateway(*engines(2)) as g:
        whole = told(await g.ask(**params))
        assert told(await g.ask(3, **params)) == whole and g.restarts == 1 and not g.errors
