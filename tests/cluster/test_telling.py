"""What router and gateway tell of a request: the access log, and the trace that leads to the engine."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from npufleet.cluster.access import AccessLog, request_id
from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.tracing import Tracing

from .router_fakes import MODEL, QUICK, FakeEngine, fleet, generate_request, tokens_of

TRACE = "00-" + "a1" * 16 + "-" + "b2" * 8 + "-01"
PARENT = (("traceparent", TRACE), ("tracestate", "x=y"))


def lines(caplog: pytest.LogCaptureFixture) -> list[dict]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "npufleet.access"]


async def test_each_call_is_one_line_without_its_content(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "npufleet.access")
    engine = FakeEngine(name="a")
    keys = Keys(["secret-key tenant=t"])
    async with fleet(engine, settings=replace(QUICK, access_log=True), keys=keys) as f:
        metadata = (("authorization", "Bearer secret-key"),)
        await tokens_of(f.stub.Generate(generate_request(3, (11, 12), "mine\nline"), metadata=metadata))
        with pytest.raises(grpc.aio.AioRpcError):
            await tokens_of(f.stub.Generate(generate_request(3)))
    served, refused = lines(caplog)
    expected = {
        "method": "Generate",
        "code": "OK",
        "model": MODEL,
        "tenant": "t",
        "engine": "a",
        "attempts": 1,
    }
    assert {key: served[key] for key in expected} == expected
    assert served["request_id"] == "mine\nline" and served["prompt_tokens"] == 2 and served["tokens"] == 3
    assert 0 < served["first_message"] <= served["seconds"] < 10
    assert refused["code"] == "UNAUTHENTICATED" and refused["model"] == "unknown" and "engine" not in refused
    text = "\n".join(record.getMessage() for record in caplog.records if record.name == "npufleet.access")
    assert text.count("\n") == 1 and "secret-key" not in text


async def test_without_an_endpoint_a_clients_trace_goes_on_unchanged():
    engine = FakeEngine(name="a")
    async with fleet(engine) as f:
        await tokens_of(f.stub.Generate(generate_request(1), metadata=PARENT))
        await tokens_of(f.stub.Generate(generate_request(1)))
    assert engine.metadata[0]["traceparent"] == TRACE and engine.metadata[0]["tracestate"] == "x=y"
    assert "traceparent" not in engine.metadata[1]


async def test_with_an_endpoint_the_engine_is_a_child_of_the_router():
    engine, exporter = FakeEngine(name="a"), InMemorySpanExporter()
    async with fleet(engine) as f:
        around = f.router._front._around
        object.__setattr__(around, "tracing", Tracing("npufleet-router", exporter=exporter))
        await tokens_of(f.stub.Generate(generate_request(2), metadata=PARENT))
        engine.fail_at = 0
        with pytest.raises(grpc.aio.AioRpcError):
            await tokens_of(f.stub.Generate(generate_request(1)))
        around.tracing.close()
    first, second = exporter.get_finished_spans()
    assert first.name == "npufleet.router/Generate"
    assert f"{first.parent.trace_id:032x}" == "a1" * 16 and f"{first.parent.span_id:016x}" == "b2" * 8
    mine = f"00-{first.context.trace_id:032x}-{first.context.span_id:016x}-01"
    assert engine.metadata[0]["traceparent"] == mine and engine.metadata[0]["tracestate"] == "x=y"
    assert first.attributes["npufleet.engine"] == "a" and first.attributes["npufleet.code"] == "OK"
    assert first.attributes["npufleet.tokens"] == 2 and first.status.is_ok
    assert second.parent is None and not second.status.is_ok


async def test_a_trace_header_that_is_none_is_no_parent():
    exporter = InMemorySpanExporter()
    tracing = Tracing("x", exporter=exporter)
    span = tracing.span("name", [("traceparent", "00-zz-01"), ("other", b"\xff")])
    assert dict(span.context())["traceparent"].startswith("00-")
    span.end(True, nothing="", number=3)
    tracing.close()
    (ended,) = exporter.get_finished_spans()
    assert ended.parent is None and dict(ended.attributes) == {"npufleet.number": 3}


@pytest.mark.parametrize("given", ["", "a b", "é", "x" * 129, "tab\there", "new\nline"])
def test_a_request_id_that_will_not_do_is_replaced(given: str):
    assert request_id(given).startswith("req-") and request_id(given) != request_id(given)
    assert request_id("client-7") == "client-7"


def test_the_log_is_off_unless_asked_for(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "npufleet.access")
    AccessLog(False).write(a=1)
    AccessLog(True).write(a="x" * 500, b=None, c="", d=0.123456789)
    (line,) = lines(caplog)
    assert line["a"] == "x" * 200 and line["d"] == 0.123457 and "b" not in line and "c" not in line
