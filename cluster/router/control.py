"""The calls of VllmEngine that are about engines rather than about a prompt.

What describes a model is answered by one engine of it, as that engine's own bytes. What describes or changes
engines goes to all of them. Request metadata ``x-npufleet-engine`` names one engine where that matters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import grpc

from npufleet.cluster.router.call import Call, CallError
from npufleet.cluster.router.errors import LOST
from npufleet.cluster.router.member import Member
from npufleet.cluster.router.picker import Picker
from npufleet.cluster.router.requests import LiveRequest, LiveRequests
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.wire import ENGINE_KEY, common_pb2, parse, path, pb

_Code = grpc.StatusCode
MISSING_KEY = "x-npufleet-missing"  # trailing metadata of GetLoads: engines that did not answer
ENGINES_KEY = "x-npufleet-engines"  # trailing metadata of GetLoads: engine=first..last fleet-wide rank, ...
_FOREVER = 10 * 365 * 86400.0

_ANSWERS = {
    "FlushCache": common_pb2.FlushCacheResponse,
    "StartProfile": common_pb2.ProfileResponse,
    "StopProfile": common_pb2.ProfileResponse,
}


class Control:
    """All of VllmEngine but Generate and Embed."""

    def __init__(self, picker: Picker, live: LiveRequests, settings: RouterSettings) -> None:
        self._pool = picker.pool
        self._live = live
        self._settings = settings
        self._endless: set[Any] = set()  # calls to engines whose streams never end by themselves

    def end_subscriptions(self) -> None:
        """End the streams that would never end by themselves."""
        for rpc in self._endless:
            rpc.cancel()

    async def health_check(self, raw: bytes, call: Call) -> bytes:
        """Healthy: the model asked for, or else each known one, has an engine that can take a request."""
        ready = self._pool.models()
        if call.model:
            call.model_label = self._pool.resolve(call.model)
            ready = {call.model: ready.get(call.model, 0)}
        lacking = [model for model, number in ready.items() if not number]
        if not ready:
            message = "no engine is known to the router yet"
        elif lacking:
            message = f"no engine is ready for: {', '.join(lacking)}"
        else:
            message = "; ".join(f"{model}: {number} ready" for model, number in ready.items())
        answer = pb.HealthCheckResponse(healthy=bool(ready) and not lacking, message=message)
        return answer.SerializeToString()

    async def ask_one(self, method: str, raw: bytes, call: Call) -> bytes:
        """The answer of one engine, passed on as it is; another one is asked if the first is lost."""
        members = self._one_of(call)[: self._settings.max_attempts]
        for last, member in zip([False] * (len(members) - 1) + [True], members, strict=True):
            rpc = self._unary(member, method, raw, call)
            try:
                answer = await rpc
            except grpc.aio.AioRpcError as error:
                member.outcome(error.code())
                if last or error.code() not in LOST:
                    raise CallError.from_engine(error, member.engine_id) from error
            else:
                if metadata := await rpc.initial_metadata():  # where an engine tells its features
                    await call.context.send_initial_metadata(tuple(metadata))
                trailing = (*(await rpc.trailing_metadata()), (ENGINE_KEY, member.engine_id))
                call.context.set_trailing_metadata(trailing)
                return answer
        raise AssertionError("the last attempt returns or raises")

    async def get_tokenizer(self, raw: bytes, call: Call) -> None:
        """Stream one engine's tokenizer bundle."""
        member = self._one_of(call)[0]
        seconds = call.remaining(self._settings.control_timeout)
        await self._pump(self._open(member, "GetTokenizer", raw, call, seconds), member, call)

    async def subscribe_kv_events(self, raw: bytes, call: Call) -> None:
        """Stream one engine's KV events.

        Sequence numbers and block hashes are an engine's own, so the streams of several engines cannot be
        merged into one of this form: the caller names the engine, unless the model has only one.
        """
        members = self._one_of(call)
        if len(members) > 1:
            names = ", ".join(member.engine_id for member in members)
            raise CallError(
                _Code.UNIMPLEMENTED,
                f"KV events are per engine; name one in metadata {ENGINE_KEY!r}: {names}",
            )
        rpc = self._open(members[0], "SubscribeKvEvents", raw, call, call.remaining(_FOREVER))
        self._endless.add(rpc)
        try:
            await self._pump(rpc, members[0], call)
        finally:
            self._endless.discard(rpc)

    async def get_loads(self, raw: bytes, call: Call) -> bytes:
        """The loads of all engines in one answer.

        ``dp_rank`` counts through the fleet: engines in the order of their ids, each with its ranks in order;
        the trailing metadata tells which engine has which. A ``dp_rank`` in the request means such a number.
        """
        request = _checked(pb.GetLoadsRequest, raw)
        members = self._all_of(call)
        ask = pb.GetLoadsRequest(include=request.include).SerializeToString()
        answers = await self._ask_all("GetLoads", ask, call, members)
        merged = pb.GetLoadsResponse(timestamp=datetime.now(UTC).isoformat())
        spans, missing = [], []
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                missing.append(member.engine_id)
                continue
            loads = pb.GetLoadsResponse.FromString(answer)
            merged.version = merged.version or loads.version
            first = merged.dp_rank_count
            for load in loads.loads:
                load.dp_rank = merged.dp_rank_count
                merged.dp_rank_count += 1
                if not request.HasField("dp_rank") or request.dp_rank == load.dp_rank:
                    merged.loads.append(load)
            spans.append(f"{member.engine_id}={first}..{merged.dp_rank_count - 1}")
        if not spans:
            raise _all_failed(members, answers)
        trailing = [(ENGINES_KEY, ", ".join(spans)), (MISSING_KEY, ", ".join(missing))]
        call.context.set_trailing_metadata(tuple(pair for pair in trailing if pair[1]))
        return merged.SerializeToString()

    async def tell_all(self, method: str, raw: bytes, call: Call) -> bytes:
        """FlushCache, StartProfile, StopProfile on every engine; success means that each succeeded."""
        members = self._all_of(call)
        answers = await self._ask_all(method, raw, call, members)
        if all(isinstance(answer, grpc.aio.AioRpcError) for answer in answers):
            raise _all_failed(members, answers)
        success, lines = True, []
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                success = False
                lines.append(f"{member.engine_id}: {answer.code().name}: {answer.details()}")
                continue
            told = _ANSWERS[method].FromString(answer)
            success = success and told.success
            lines.append(f"{member.engine_id}: {told.message or ('done' if told.success else 'failed')}")
        return _ANSWERS[method](success=success, message="; ".join(lines)).SerializeToString()

    async def abort(self, raw: bytes, call: Call) -> bytes:
        """Abort requests that run through this router; unknown ids are ignored, as an engine does."""
        found: list[LiveRequest] = []
        for request_id in _checked(pb.AbortRequest, raw).request_ids:
            try:
                found += self._live.find(request_id, call.peer)
            except ValueError as error:
                raise CallError(_Code.FAILED_PRECONDITION, str(error)) from error
        for live in found:
            live.aborted = True
        by_engine: dict[str, list[str]] = {}
        for live in found:
            if live.lease is not None:
                by_engine.setdefault(live.lease.endpoint.engine_id, []).append(live.engine_request_id)
        pairs = [(self._pool.member(engine_id), ids) for engine_id, ids in by_engine.items()]
        calls = [
            self._unary(m, "Abort", pb.AbortRequest(request_ids=ids).SerializeToString(), call)
            for m, ids in pairs
            if m is not None
        ]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                raise CallError(answer.code(), answer.details() or answer.code().name)
            if isinstance(answer, BaseException):
                raise answer
        return pb.AbortResponse().SerializeToString()

    def _one_of(self, call: Call) -> list[Member]:
        """Ready engines that may answer for the model asked for, or just the engine asked for."""
        if call.engine_id:
            member = self._pool.member(call.engine_id)
            if member is None:
                names = ", ".join(m.engine_id for m in self._pool.members()) or "none"
                raise CallError(_Code.NOT_FOUND, f"no engine {call.engine_id[:200]!r}; there is: {names}")
            call.model_label = member.endpoint.model
            return [member]
        call.model_label = model = self._pool.resolve(call.model)
        members = self._pool.pickable(model)
        if not members:
            raise self._pool.not_ready(model)
        return members

    def _all_of(self, call: Call) -> list[Member]:
        """Every ready engine: of the model asked for, or of all models; or just the engine asked for."""
        models = self._pool.models()
        if call.engine_id or call.model or len(models) <= 1:
            return self._one_of(call)
        members = [member for model in models for member in self._pool.pickable(model)]
        if not members:
            raise self._pool.not_ready(next(iter(models)))
        return members

    async def _ask_all(
        self, method: str, raw: bytes, call: Call, members: Sequence[Member]
    ) -> list[bytes | grpc.aio.AioRpcError]:
        async def ask(member: Member) -> bytes | grpc.aio.AioRpcError:
            try:
                return await self._unary(member, method, raw, call)
            except grpc.aio.AioRpcError as error:
                member.outcome(error.code())
                return error

        return list(await asyncio.gather(*map(ask, members)))

    def _unary(self, member: Member, method: str, raw: bytes, call: Call) -> Any:
        timeout = call.remaining(self._settings.control_timeout)
        ask = member.channel.unary_unary(path(method))
        return ask(raw, timeout=timeout, metadata=tuple(call.forwarded()))

    def _open(self, member: Member, method: str, raw: bytes, call: Call, seconds: float) -> Any:
        open_stream = member.channel.unary_stream(path(method))
        return open_stream(raw, timeout=seconds, metadata=tuple(call.forwarded()))

    async def _pump(self, rpc: Any, member: Member, call: Call) -> None:
        try:
            while (message := await rpc.read()) is not grpc.aio.EOF:
                await call.context.write(message)
        except grpc.aio.AioRpcError as error:
            member.outcome(error.code())
            raise CallError.from_engine(error, member.engine_id) from error
        finally:
            rpc.cancel()  # does nothing to a stream that has ended


def _checked(kind: Any, raw: bytes) -> Any:
    try:
        return parse(kind, raw)
    except ValueError as error:
        raise CallError(_Code.INVALID_ARGUMENT, str(error)) from error


def _all_failed(members: Sequence[Member], answers: Sequence[bytes | grpc.aio.AioRpcError]) -> CallError:
    first = answers[0]
    assert isinstance(first, grpc.aio.AioRpcError)
    details = "; ".join(
        f"{member.engine_id}: {answer.details()}"
        for member, answer in zip(members, answers, strict=True)
        if isinstance(answer, grpc.aio.AioRpcError)
    )
    return CallError(first.code(), f"no engine answered: {details}")
