"""Streams that break and go on elsewhere: the client sees one answer, or today's error and why it is one."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as pb

from npufleet.cluster.proto.extension import EXTENSION_KEY, encode
from npufleet.cluster.router import member
from npufleet.cluster.router.replay.known import KnownLimits

from .router_fakes import MODEL, QUICK, FakeEngine, Fleet, endpoint, fleet, until

Code = grpc.StatusCode
EOS, ALSO_EOS = 49_999, 49_998
PROMPT = (3, 1, 4, 1, 5)
LENGTH = 8  # tokens of an answer


@pytest.fixture(autouse=True)
def believed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are lost again and again are picked again without the pause that grows."""
    monkeypatch.setattr(member, "_LONGEST_HOLD", 0.05)


def next_token(ids: list[int]) -> int:
    """What the model says after ``ids``: each of them matters, and so does their order."""
    value = 7
    for token in ids:
        value = (value * 31 + token + 1) % 40_009
    return value


@dataclass(eq=False)
class Chain(FakeEngine):
    """A model whose next token follows from all tokens before it, told as vLLM's servicer tells it."""

    breaks: list[int | str] = field(default_factory=list)
    """Where streams break, one after another, whichever of the engines with this list it is: before the token of that
    position in prompt and answer (below 0: nothing more comes), between the last token and the "end", or between that
    and the "status".
    """
    code: Code = Code.UNAVAILABLE
    per_message: int = 1
    end: tuple[int, int] = (
        1 << 30,
        EOS,
    )  # from how many tokens of prompt and answer on which end token is the next one
    eos: tuple[int, ...] = (EOS, ALSO_EOS)
    max_len: int = 1 << 20
    hangs_after: int = 1 << 30  # tokens of a call that goes on with an answer

    async def Generate(self, request, context):
        self.seen.append(request)
        me = len(self.seen)
        self.running.add(me)
        try:
            async for answer in self._say(request, context):
                yield answer
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(self.name)
            raise
        finally:
            self.running.discard(me)

    async def _say(self, request, context):
        params, ids = request.sampling_params, list(request.tokenized.input_ids)
        begun, told, reason = len(ids), len(ids), ""
        while not reason:
            if begun > len(PROMPT) and len(ids) - begun >= self.hangs_after:
                await asyncio.Event().wait()
            await self._break_at(len(ids), context)
            reason = self._extend(ids, begun, params)
            cut = bool(self.breaks) and self.breaks[0] in (len(ids), -len(ids))
            if reason or cut or len(ids) - told >= self.per_message:
                delta, told = ids[told:], len(ids)
                yield pb.GenerateResponse(chunk=self._part(pb.GenerateStreamChunk, begun, delta, params))
        await self._break_at("end", context)
        done = self._part(pb.GenerateComplete, begun, delta, params)
        done.finish_reason = reason
        if reason == "stop" and ids[-1] != self.eos[0]:
            done.matched_token_id = ids[-1]
        yield pb.GenerateResponse(complete=done)
        await self._break_at("status", context)

    def _extend(self, ids: list[int], begun: int, params: pb.SamplingParams) -> str:
        """Say one more token; how that ends the answer, if it does."""
        said = len(ids) - begun
        stops = {*(() if params.ignore_eos else self.eos), *params.stop_token_ids}
        at, token = self.end
        token = token if len(ids) >= at else next_token(ids)
        if said < params.min_tokens and token in stops:
            token = next_token(ids)
        ids.append(token)
        if token in stops:
            return "stop"
        full = params.HasField("max_tokens") and said + 1 >= params.max_tokens
        return "length" if full or len(ids) >= self.max_len else ""

    async def _break_at(self, where: int | str, context) -> None:
        if self.breaks and self.breaks[0] == where:
            self.breaks.pop(0)
            await context.abort(self.code, f"{self.name} is gone")
        if isinstance(where, int) and self.breaks and self.breaks[0] == -where:
            self.breaks.pop(0)
            await asyncio.Event().wait()

    def _part(self, kind, prompt_tokens: int, tokens: list[int], params: pb.SamplingParams):
        part = kind(
            prompt_tokens=prompt_tokens, completion_tokens=len(tokens), cached_tokens=prompt_tokens // 2
        )
        (part.token_ids if kind is pb.GenerateStreamChunk else part.output_ids).extend(tokens)
        if params.HasField("logprobs"):
            part.output_logprobs.token_ids.extend(tokens)
            part.output_logprobs.token_logprobs.extend(-token / 65_536 for token in tokens)
        return part

    async def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(eos_token_ids=self.eos, max_context_length=self.max_len)


def ask(tokens: int | None = LENGTH, **params) -> pb.GenerateRequest:
    made = pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=PROMPT, original_text="three one four"),
        sampling_params=pb.SamplingParams(**{"temperature": 0.0, **params}),
        stream=True,
    )
    if tokens is not None:
        made.sampling_params.max_tokens = tokens
    return made


async def read(call) -> tuple[list[pb.GenerateResponse], grpc.aio.AioRpcError | None]:
    got: list[pb.GenerateResponse] = []
    try:
        async for answer in call:
            got.append(answer)
    except grpc.aio.AioRpcError as error:
        return got, error
    return got, None


def positions(*breaks: int | str) -> list[int | str]:
    """Breaks after so many tokens of an answer to PROMPT, as engines count them; below 0: silence instead."""
    return [at if isinstance(at, str) else at + (len(PROMPT) if at > 0 else -len(PROMPT)) for at in breaks]


async def ready(f: Fleet) -> None:
    await until(lambda: all(engine.pickable for engine in f.router.picker.pool.members()))


async def answered(
    f: Fleet, request: pb.GenerateRequest, *breaks: int | str, **metadata
) -> list[pb.GenerateResponse]:
    """The answer of ``f``, whose engines share one list of breaks, to a request whose stream breaks so."""
    await ready(f)
    for engine in f.engines:
        engine.seen.clear()
    shared = f.engines[0].breaks
    shared[:] = positions(*breaks)
    got, error = await read(f.stub.Generate(request, **metadata))
    assert error is None, error.details()
    assert not shared, "it broke where it was to break"
    return got


def engines(number: int, **more) -> list[Chain]:
    breaks: list[int | str] = []
    return [Chain(name="abc"[i], breaks=breaks, **more) for i in range(number)]


def resumed(f: Fleet, outcome: str) -> float:
    return f.metric("npufleet_router_resumed_total", model=MODEL, outcome=outcome)


async def idle(f: Fleet) -> None:
    """Nothing of a request is left anywhere."""
    await until(lambda: not any(engine.running for engine in f.engines))
    await until(lambda: all(engine.in_flight == 0 for engine in f.router.picker.pool.members()))
    await until(lambda: len(f.router.front.live) == 0)


@pytest.mark.parametrize(
    ("code", "transport"),
    [
        (Code.UNAVAILABLE, "http2"),
        (Code.UNAVAILABLE, "grpcio"),
        (Code.INTERNAL, "http2"),
        (Code.ABORTED, "http2"),
    ],
)
async def test_a_stream_broken_at_any_token_is_the_unbroken_one(code: grpc.StatusCode, transport: str):
    request = ask(logprobs=1, min_tokens=3)
    chosen = replace(QUICK, breaker_failures=100, transport=transport)
    async with fleet(*engines(2, code=code), settings=chosen) as f:
        whole = await answered(f, request)
        assert len(whole) == LENGTH + 1 and whole[-1].complete.finish_reason == "length"
        for cut in range(1, LENGTH):
            assert await answered(f, request, cut) == whole
            rest = (
                f.engines[0] if len(f.engines[0].seen[0].tokenized.input_ids) > len(PROMPT) else f.engines[1]
            )
            seen = rest.seen[0]
            said = [token for answer in whole[:cut] for token in answer.chunk.token_ids]
            assert list(seen.tokenized.input_ids) == [*PROMPT, *said]
            assert (seen.sampling_params.max_tokens, seen.sampling_params.min_tokens) == (
                LENGTH - cut,
                max(0, 3 - cut),
            )
        assert resumed(f, "resumed") == LENGTH - 1
        assert await answered(f, request, "end") == whole
        assert await answered(f, request, "status") == whole
        assert resumed(f, "ended") == 2
        await idle(f)


@pytest.mark.parametrize(
    ("engine", "params", "reason"),
    [
        ({"end": (9, EOS)}, {"min_tokens": 2}, "stop"),
        ({"end": (9, ALSO_EOS)}, {}, "stop"),
        ({"end": (0, EOS)}, {"min_tokens": 5}, "stop"),
        ({"end": (9, EOS)}, {"ignore_eos": True}, "length"),
        ({"end": (9, 77)}, {"stop_token_ids": [77]}, "stop"),
        ({"max_len": 11}, {}, "length"),
    ],
)
async def test_each_way_an_answer_ends_is_found_behind_the_seam(engine: dict, params: dict, reason: str):
    request = ask(None if "max_len" in engine else 20, **params)
    async with fleet(*engines(2, **engine)) as f:
        whole = await answered(f, request)
        assert whole[-1].complete.finish_reason == reason
        for where in (*range(1, len(whole) - 1), "end", "status"):
            assert await answered(f, request, where) == whole, where
        assert resumed(f, "ended") == 2


async def test_a_second_loss_and_one_before_the_next_token():
    async with fleet(*engines(3)) as f:
        whole = await answered(f, ask())
        for breaks in [(2, 5), (3, 3), (7, "end")]:
            assert await answered(f, ask(), *breaks) == whole
        assert resumed(f, "failed") == 0


def test_wherever_it_breaks_and_however_its_messages_are_cut():
    """The tokens, their log probabilities, the counts and the end, over up to two breaks of three engines."""

    def told(answers: list[pb.GenerateResponse]) -> tuple:
        chunks = [answer.chunk for answer in answers[:-1]]
        end = answers[-1].complete
        assert all(chunk.completion_tokens == len(chunk.token_ids) for chunk in chunks)
        return (
            [token for chunk in chunks for token in chunk.token_ids],
            [value for chunk in chunks for value in chunk.output_logprobs.token_logprobs],
            {(chunk.prompt_tokens, chunk.cached_tokens) for chunk in chunks},
            (end.finish_reason, end.prompt_tokens, end.cached_tokens, end.WhichOneof("matched_stop")),
        )

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        three = engines(3, end=(len(PROMPT) + 9, EOS))
        f = runner.run(stack.enter_async_context(fleet(*three)))

        @settings(max_examples=30)
        @given(
            per_message=st.integers(1, 5),
            limit=st.integers(3, 14),
            cuts=st.lists(st.integers(1, 9), max_size=2).map(sorted),
            ending=st.sampled_from([(), ("end",), ("status",)]),
        )
        def holds(per_message: int, limit: int, cuts: list[int], ending: tuple[str, ...]) -> None:
            last = min(limit, 10)
            breaks = [*(cut for cut in cuts if cut < last), *ending][:2]
            for engine in three:
                engine.per_message = per_message
            whole = runner.run(answered(f, ask(limit, logprobs=1)))
            assert told(runner.run(answered(f, ask(limit, logprobs=1), *breaks))) == told(whole)

        try:
            holds()
        finally:
            runner.run(stack.aclose())


REFUSED = {
    "its tokens are drawn": ({"temperature": 1.0}, {}),
    "presence and frequency": ({"presence_penalty": 0.5}, {}),
    "stop strings": ({"stop": ["x"]}, {}),
    "grammar": ({"regex": "a+"}, {}),
    "prompt": ({"prompt_logprobs": 1}, {}),
    "bad_words concerns": ({}, {"bad_words": ["x"]}),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_what_cannot_go_on_ends_with_todays_error_and_the_reason(why: str):
    params, fields = REFUSED[why]
    extension = encode(fields)
    metadata = () if extension is None else ((EXTENSION_KEY, extension),)
    async with fleet(*engines(2)) as f:
        f.engines[0].breaks.append(len(PROMPT) + 2)
        got, error = await read(f.stub.Generate(ask(**params), metadata=metadata))
        assert len(got) == 2 and error is not None and error.code() is Code.UNAVAILABLE
        assert "was lost after 2 messages: " in error.details() and why in error.details()
        assert sum(f.served()) == 1 and resumed(f, "refused") == 1
        await idle(f)


@pytest.mark.parametrize(
    ("code", "resume", "details"),
    [
        (Code.UNAVAILABLE, "off", "engine 'a' was lost after 2 messages: a is gone"),
        (Code.INVALID_ARGUMENT, "greedy", "a is gone"),
        (Code.DEADLINE_EXCEEDED, "greedy", "a is gone"),
    ],
)
async def test_what_the_client_caused_or_nobody_wants_is_left_alone(code: Code, resume: str, details: str):
    async with fleet(*engines(2, code=code), settings=replace(QUICK, resume=resume)) as f:
        f.engines[0].breaks.append(len(PROMPT) + 2)
        _, error = await read(f.stub.Generate(ask()))
        assert error is not None and error.code() is code
        assert error.details().replace("b", "a") == details.replace("b", "a")
        assert sum(f.served()) == 1
        assert not any(resumed(f, outcome) for outcome in ("resumed", "ended", "refused", "failed"))


def lose_the_link(f: Fleet, how: str) -> None:
    """Close the link to the engine that has a request, as the router does: the engine is stuck, or has left."""
    (busy,) = [each for each in f.router.picker.pool.members() if each.in_flight]
    if how == "stuck":
        busy.channel.drop("stuck")
    else:
        f.source.put(*(endpoint(engine) for engine in f.engines if engine.name != busy.engine_id))


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
@pytest.mark.parametrize("how", ["stuck", "left"])
async def test_a_stream_whose_link_the_router_closes_goes_on(how: str, transport: str):
    async with fleet(*engines(2), settings=replace(QUICK, transport=transport, leave_timeout=0.1)) as f:
        whole = await answered(f, ask())
        f.engines[0].breaks[:] = positions(-3)
        call = f.stub.Generate(ask())
        got = [await call.read() for _ in range(3)]
        lose_the_link(f, how)
        while (message := await call.read()) is not grpc.aio.EOF:
            got.append(message)
        assert got == whole and resumed(f, "resumed") == 1
        await until(lambda: len(f.router.front.live) == 0)


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_a_request_without_an_answer_goes_elsewhere_when_its_link_is_closed(transport: str):
    async with fleet(*engines(2), settings=replace(QUICK, transport=transport)) as f:
        f.engines[0].breaks[:] = positions(0)
        reading = asyncio.create_task(read(f.stub.Generate(ask())))
        await until(lambda: sum(f.served()) == 1 and not f.engines[0].breaks)
        lose_the_link(f, "stuck")
        got, error = await reading
        assert error is None and len(got) == LENGTH + 1


@dataclass(eq=False)
class Curt(Chain):
    """Ends streams where they are to break, with OK and without the end of the answer."""

    async def _say(self, request, context):
        async for answer in super()._say(request, context):
            yield answer
            if self.breaks and self.breaks[0] == len(request.tokenized.input_ids) + len(
                answer.chunk.token_ids
            ):
                self.breaks.pop(0)
                return


async def test_a_stream_that_ends_well_without_the_end_of_its_answer_goes_on():
    breaks: list[int | str] = []
    async with fleet(*(Curt(name=name, breaks=breaks) for name in "ab")) as f:
        whole = await answered(f, ask())
        assert await answered(f, ask(), 1) == whole
        assert resumed(f, "resumed") == 1
        breaks.append(len(PROMPT) + 1)
        got, error = await read(f.stub.Generate(ask(temperature=1.0)))
        assert error is None and len(got) == 1, "what nobody could go on with is passed on as it is"


async def test_drawn_tokens_go_on_where_the_user_lets_them_but_not_those_of_a_seed():
    async with fleet(*engines(2), settings=replace(QUICK, resume="all")) as f:
        whole = await answered(f, ask(temperature=1.0))
        assert await answered(f, ask(temperature=1.0), 3) == whole
        f.engines[0].breaks.append(len(PROMPT) + 2)
        _, error = await read(f.stub.Generate(ask(temperature=1.0, seed=5)))
        assert error is not None and "a seed binds its draws" in error.details()


@dataclass(eq=False)
class Doomed(Chain):
    """Breaks after the first token of each call."""

    async def _break_at(self, where: int | str, context) -> None:
        if where == len(self.seen[-1].tokenized.input_ids) + 1:
            await context.abort(self.code, f"{self.name} is gone")


@pytest.mark.parametrize(("code", "most"), [(Code.UNAVAILABLE, 3), (Code.INTERNAL, 2)])
async def test_a_stream_meets_as_many_engines_as_a_retry_would(code: grpc.StatusCode, most: int):
    async with fleet(*(Doomed(name=name, code=code) for name in "abcd")) as f:
        got, error = await read(f.stub.Generate(ask()))
        assert error is not None and error.code() is code
        assert f"it has been on {most} engines" in error.details()
        assert sum(f.served()) == len(got) == most
        assert (resumed(f, "resumed"), resumed(f, "failed")) == (most - 1, 1)
        await idle(f)


async def test_the_retry_budget_bounds_it():
    async with fleet(*engines(2), settings=replace(QUICK, retry_budget=1)) as f:
        await answered(f, ask(), 2)  # spends the one there was; a success gives a fifth of one back
        await ready(f)
        f.engines[0].breaks.append(len(PROMPT) + 2)
        _, error = await read(f.stub.Generate(ask()))
        assert error is not None and "too many requests go to other engines" in error.details()


async def test_without_another_engine_it_says_so():
    async with fleet(*engines(1)) as f:
        f.engines[0].breaks.append(len(PROMPT) + 2)
        got, error = await read(f.stub.Generate(ask()))
        assert len(got) == 2 and error is not None
        assert (
            "was lost after 2 messages: a is gone; nobody could go on with it: no other engine"
            in error.details()
        )
        assert resumed(f, "failed") == 1


async def test_engines_that_do_not_tell_their_end_tokens_are_not_gone_on_with():
    async with fleet(*engines(2, eos=())) as f:
        f.engines[0].breaks.append(len(PROMPT) + 2)
        _, error = await read(f.stub.Generate(ask()))
        assert error is not None and "do not tell which tokens end an answer" in error.details()
        assert await answered(f, ask(ignore_eos=True), 2) == await answered(f, ask(ignore_eos=True))


async def test_an_engine_that_came_back_with_other_limits_is_asked_again():
    async with fleet(*engines(1, max_len=11)) as f:
        await ready(f)
        known, members = KnownLimits(), f.router.picker.pool.members()
        (engine,) = f.engines
        for limit in (11, 20):
            engine.max_len = limit
            for _ in range(2):
                limits = await known.of(members, lambda: 5.0)
                assert limits is not None and limits.max_model_len == limit
            await engine.stop()
            await until(lambda: not members[0].pickable)
            await engine.start()
            await ready(f)


@pytest.mark.parametrize("hangs_after", [0, 2])
async def test_a_client_that_leaves_in_the_seam_or_behind_it_ends_the_new_engines_work(hangs_after: int):
    async with fleet(*engines(2, hangs_after=hangs_after)) as f:
        f.engines[0].breaks.append(len(PROMPT) + 2)
        call = f.stub.Generate(ask())
        for _ in range(2 + hangs_after):
            assert (await call.read()).chunk.token_ids
        await until(lambda: sum(f.served()) == 2 and any(engine.running for engine in f.engines))
        call.cancel()
        await idle(f)
        assert sum(len(engine.cancelled) for engine in f.engines) == 1


async def test_the_clients_deadline_holds_across_the_seam():
    async with fleet(*engines(2, hangs_after=4)) as f:
        f.engines[0].breaks.append(len(PROMPT) + 2)
        got, error = await read(f.stub.Generate(ask(), timeout=1.0))
        assert error is not None and error.code() is Code.DEADLINE_EXCEEDED
        assert len(got) == 6 and sum(f.served()) == 2
        await idle(f)


async def test_an_abort_behind_the_seam_reaches_the_new_engine():
    async with fleet(*engines(2, hangs_after=4)) as f:
        f.engines[0].breaks.append(len(PROMPT) + 2)
        call = f.stub.Generate(ask())
        for _ in range(6):
            await call.read()
        await f.stub.Abort(pb.AbortRequest(request_ids=["r"]))
        assert [engine.aborted for engine in f.engines if engine.running] == [["r"]]
        call.cancel()
        await idle(f)


async def test_tokens_are_charged_once():
    async with fleet(*engines(2)) as f:
        await answered(f, ask(), 3)
        total = sum(
            sample.value
            for family in f.router.metrics.tenant_tokens.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        )
        assert total == LENGTH
