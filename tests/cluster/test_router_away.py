"""Requests that a router places elsewhere: counted while they run, whatever is told of them and whatever is not."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import grpc
import pytest

from npufleet.cluster.router.picker import NoEngine, RequestInfo

from .router_fakes import MODEL, QUICK, FakeEngine, fleet

Code = grpc.StatusCode
INFO = RequestInfo(model=MODEL, prompt_tokens=7, request_id="r")


async def test_what_is_told_twice_or_of_nobody_changes_nothing():
    async with fleet(FakeEngine(name="a")) as f:
        away, load = f.router.front.away, f.router.picker.pool.member("a").ledgers[0].share
        one = await away.place("Generate", INFO, via="test")
        assert len(away) == 1 and load().queued_tokens == 7
        assert away.started(one.id) and away.started(one.id)
        assert load().queued == 0
        assert away.ended(one.id, Code.OK) and not away.ended(one.id, Code.OK) and not away.started(one.id)
        assert len(away) == 0 and load().in_flight == 0
        assert f.metric("npufleet_router_first_message_seconds_count", model=MODEL) == 1


async def test_those_that_one_carrier_had_go_with_it():
    async with fleet(FakeEngine(name="a")) as f:
        away = f.router.front.away
        await away.place("Generate", INFO, via="one")
        kept = await away.place("Generate", INFO, via="other")
        away.forget("one")
        assert len(away) == 1 and away.get(kept.id) is kept
        assert f.router.picker.models() == {MODEL: 1}  # its carrier's end says nothing about the engine


async def test_a_retry_may_go_to_the_next_best_and_never_to_the_same():
    engines = [FakeEngine(name=name) for name in "abc"]
    async with fleet(*engines, policy="least-load") as f:
        away = f.router.front.away
        for _ in range(3):
            await away.place("Generate", INFO, via="test")
        busy = await away.place("Generate", replace(INFO, excluded=frozenset("c")), via="test")
        other = "b" if busy.lease.endpoint.engine_id == "a" else "a"
        assert [e.engine_id for e in busy.others] == [other]
        last = await away.place("Generate", INFO, via="test")
        assert {e.engine_id for e in last.others} == set("abc") - {last.lease.endpoint.engine_id}
        with pytest.raises(NoEngine):
            await away.place("Generate", replace(INFO, excluded=frozenset("abc")), via="test")


async def test_the_access_log_tells_of_them(caplog):
    caplog.set_level(logging.INFO, "npufleet.access")
    async with fleet(FakeEngine(name="a"), settings=replace(QUICK, access_log=True)) as f:
        away = f.router.front.away
        one = await away.place("Generate", INFO, via="test", peer="10.0.0.9:1")
        away.started(one.id)
        away.ended(one.id, Code.INTERNAL, retries=1)
        line = json.loads(next(r.getMessage() for r in caplog.records if r.name == "npufleet.access"))
    told = {
        key: line[key]
        for key in ("method", "code", "model", "peer", "engine", "attempts", "via", "request_id")
    }
    assert told == {
        "method": "Generate", "code": "INTERNAL", "model": MODEL, "peer": "10.0.0.9:1",
        "engine": "a", "attempts": 2, "via": "test", "request_id": "r",
    }  # fmt: skip
    assert line["seconds"] >= line["first_message"] >= 0
