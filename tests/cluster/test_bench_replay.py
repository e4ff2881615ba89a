"""Replays against engines and gateways that are fakes, and the numbers that come of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from npufleet.cluster import cli
from npufleet.cluster.bench.replay import Objectives, Plan, replay, sum_up
from npufleet.cluster.bench.target import Outcome, target
from npufleet.cluster.bench.trace import conversations, read, tokens, write

from .router_fakes import FakeEngine, fleet

TRACE = conversations(sessions=4, turns=3, rate=40.0, seed=2)


@asynccontextmanager
async def openai_server(cached: int = 7, status: int = 200) -> AsyncIterator[tuple[str, list[dict]]]:
    """An HTTP server that answers as a gateway does, in so few lines that it keeps no connection."""
    seen: list[dict] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (
                int(line.split(":")[1])
                for line in head.splitlines()
                if line.lower().startswith("content-length")
            ),
            0,
        )
        body = json.loads(await reader.readexactly(length)) if length else {}
        if "/v1/models" in head:
            text = json.dumps({"data": [{"id": "tiny"}]})
        else:
            seen.append(body)
            usage = {
                "prompt_tokens": len(body["prompt"]),
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": cached},
            }
            events = [
                {"choices": [{"text": "a"}]},
                {"choices": [{"text": "b"}]},
                {"choices": [], "usage": usage},
            ]
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        head = f"HTTP/1.1 {status if seen else 200} X\r\ncontent-length: {len(text)}\r\nconnection: close"
        writer.write(f"{head}\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen


async def test_a_trace_is_replayed_through_a_router():
    engines = [FakeEngine(name=name) for name in "ab"]
    async with fleet(*engines) as running:
        to = target(f"grpc://{running.router.address}", "", 30.0)
        await to.open()
        told = []
        outcomes = await replay(TRACE, to, Plan(time_scale=2.0), lambda *numbers: told.append(numbers))
        await to.close()
    assert not any(one.error for one in outcomes)
    got = {request.request_id: request for engine in engines for request in engine.seen}
    assert len(got) == len(TRACE) and told[-1] == (len(TRACE), len(TRACE), 0, len(TRACE))
    sent = sorted(len(request.tokenized.input_ids) for request in got.values())
    assert sent == sorted(one.prompt_tokens for one in TRACE)
    sessions = {meta.get("x-npufleet-session") for engine in engines for meta in engine.metadata}
    assert sessions == {one.session for one in TRACE}
    spread = outcomes[-1].due - outcomes[0].due
    assert spread == pytest.approx((TRACE[-1].at - TRACE[0].at) / 2)


async def test_failed_requests_are_told_and_do_not_end_the_replay():
    async with fleet(FakeEngine(name="a", fail_at=0)) as running:
        to = target(f"grpc://{running.router.address}", "tiny", 30.0)
        await to.open()
        outcomes = await replay(TRACE, to, Plan(limit=3))
        await to.close()
    report = sum_up(outcomes, Objectives())
    assert report.requests == report.failed == 3 and report.errors == {"UNAVAILABLE": 3}


async def test_an_openai_endpoint_is_replayed_with_token_ids():
    async with openai_server() as (url, seen):
        to = target(url, "", 30.0)
        await to.open()
        outcomes = await replay(TRACE, to, Plan(length_scale=0.1, limit=6))
        await to.close()
    assert [len(body["prompt"]) for body in seen] and len(seen) == 6
    assert all(0 <= token < 250 for body in seen for token in body["prompt"])
    assert all(one.cached_tokens == 7 and one.first <= one.end and not one.error for one in outcomes)
    assert sorted(one.prompt_tokens for one in outcomes) == sorted(
        round(0.1 * one.prompt_tokens) for one in TRACE[:6]
    )


async def test_an_http_error_is_the_requests_error():
    async with openai_server(status=503) as (url, _):
        to = target(url, "tiny", 30.0)
        await to.open()
        outcomes = await replay(TRACE, to, Plan(limit=2))
        await to.close()
    assert [one.error[:8] for one in outcomes] == ["HTTP 503", "HTTP 503"]


async def test_an_endpoint_that_is_not_there_is_an_error_with_its_name():
    for url in ("grpc://127.0.0.1:1", "http://127.0.0.1:1"):
        to = target(url, "", 1.0)
        with pytest.raises(OSError, match=r"127\.0\.0\.1:1"):
            await to.open()
        await to.close()
    with pytest.raises(ValueError, match="neither grpc"):
        target("127.0.0.1:1", "", 1.0)


def test_shorter_prompts_keep_their_shared_beginnings():
    from npufleet.cluster.bench.replay import _tokens

    first, second = [one for one in TRACE if one.session == TRACE[0].session][:2]
    plan = Plan(length_scale=0.25)
    a, b = plan.requests([first])[0], plan.requests([second])[0]
    short = [_tokens(a, 0, 250, 0.25), _tokens(b, 1, 250, 0.25)]
    shared = sum(x == y for x, y in zip(first.hash_ids, second.hash_ids, strict=False)) * 128
    assert shared and short[0][:shared] == short[1][:shared]
    assert [len(one) for one in short] == [a.prompt_tokens, b.prompt_tokens]
    assert tokens(first, 0, 250) == tokens(first, 0, 250)


def test_the_report_counts_what_meets_the_objectives():
    def made(ttft: float, tpot: float, error: str = "") -> Outcome:
        return Outcome(
            due=10.0, sent=10.0, first=10.0 + ttft, end=10.0 + ttft + 9 * tpot, output_tokens=10,
            prompt_tokens=100, cached_tokens=25, error=error,
        )  # fmt: skip

    outcomes = [made(1.0, 0.05), made(3.0, 0.05), made(1.0, 0.5), made(0.5, 0.01, "X: y")]
    report = sum_up(outcomes, Objectives(ttft=2.0, tpot=0.1))
    assert (report.requests, report.failed, report.good, report.hit_rate) == (4, 1, 0.25, 0.25)
    assert report.seconds == pytest.approx(5.5) and report.goodput == pytest.approx(1 / 5.5)
    assert report.ttft_mean == pytest.approx(5 / 3) and report.errors == {"X": 1}
    assert sum_up([], Objectives()).requests == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.jsonl", "--url", "grpc://h:1"], "no such trace"),
        (["TRACE", "--url", "h:1"], "neither grpc"),
        (["TRACE", "--url", "grpc://h:1", "--time-scale", "0"], "--time-scale must be above 0"),
        (["TRACE", "--url", "grpc://h:1", "--requests", "0"], "--requests: expected an integer from 1"),
        (["TRACE", "--url", "grpc://h"], "neither grpc"),
        (["TRACE", "--url", "grpc://h:99999"], "--url 'grpc://h:99999': "),
        (["TRACE", "--url", "grpc://h:1", "--time-scale", "nan"], "--time-scale must be above 0"),
        (["TRACE", "--url", "grpc://h:1", "--time-scale", "inf"], "--time-scale must be above 0"),
        (["TRACE", "--url", "grpc://h:1", "--timeout", "nan"], "--timeout: expected a number"),
        (["TRACE", "--url", "grpc://h:1", "--ttft", "0"], "--ttft must be above 0"),
        (
            ["TRACE", "--url", "grpc://h:1", "--json", "/absent/r.json"],
            "--json /absent/r.json: no file can be",
        ),
        (["TRACE", "--url", "grpc://h:1", "--json", "/tmp"], "--json /tmp: no file can be written there"),
        (["TRACE", "--url", "grpc://h:1", "--plot", "r.gif"], "must end with one of .svg, .png, .pdf"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, capsys, arguments, said):
    write(tmp_path / "t.jsonl", TRACE)
    arguments = [str(tmp_path / "t.jsonl") if one == "TRACE" else one for one in arguments]
    assert cli.main(["bench", "replay", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.jsonl", b"\xff\xfe", "it is not UTF-8 text"),
        (
            "t.jsonl",
            b'{"timestamp": NaN, "input_length": 1, "output_length": 1}',
            ":1: .*a time must be a number",
        ),
        ("t.jsonl", b'{"timestamp": 0, "input_length": 1e12, "output_length": 1}', ":1: not a request"),
        (
            "t.jsonl",
            b'{"timestamp": 0, "input_length": 999999999, "output_length": 1}',
            ":1: .*a length must be",
        ),
        ("t.jsonl", b'{"timestamp": 0}', ":1: not a request of a trace: it has no 'input_length'"),
        ("t.csv", b"a,b\n1,2\n", ":2: not a request of a trace: it has no 'TIMESTAMP'"),
    ],
)
def test_a_trace_that_is_none_is_told_by_its_line(tmp_path, name, text, said):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=said):
        read(tmp_path / name)


def test_the_command_reports_writes_and_plots(tmp_path, capsys):
    write(tmp_path / "t.jsonl", TRACE)

    async def serve_and_run() -> int:
        async with openai_server() as (url, _):
            out = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg"), "--quiet"]
            return await asyncio.to_thread(
                cli.main,
                ["bench", "replay", str(tmp_path / "t.jsonl"), "--url", url, "--time-scale", "5", *out],
            )

    assert asyncio.run(serve_and_run()) == 0
    assert "prefix cache" in capsys.readouterr().out
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["report"]["requests"] == len(written["requests"]) == len(TRACE)
    assert "<svg" in (tmp_path / "r.svg").read_text()
