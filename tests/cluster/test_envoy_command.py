"""The router and an Envoy of the user's own, as separate processes that meet in a folder."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2_grpc

from npufleet.cluster import cli
from npufleet.cluster.router.envoy.admin import Admin
from npufleet.cluster.router.envoy.process import find_envoy
from npufleet.cluster.router.envoy.server import serve_endpoint_picker
from npufleet.cluster.tls import ServerTls

from .certificates import Authority
from .router_fakes import MODEL, QUICK, FakeEngine, fleet, generate_request, tokens_of

Code = grpc.StatusCode


def route(engine: FakeEngine, folder: Path, *more: str) -> list[str]:
    """The arguments of a router before which the user runs Envoy."""
    return [
        *("route", "--engine", f"{MODEL}@{engine.address}", "--port", "0", "--policy", "round-robin"),
        *("--data-plane", "envoy", "--envoy", "none", "--envoy-folder", str(folder), *more),
    ]


async def spawn(stack: AsyncExitStack, *command: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)

    async def end() -> None:
        if process.returncode is None:
            process.kill()
            await process.wait()

    stack.push_async_callback(end)
    return process


async def router(stack: AsyncExitStack, engine: FakeEngine, folder: Path) -> asyncio.subprocess.Process:
    process = await spawn(stack, sys.executable, "-m", "npufleet.cluster.cli", *route(engine, folder))
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert b"router listens" in await process.stdout.readline()
    return process


@pytest.mark.slow
async def test_a_killed_picker_means_unavailable_until_it_is_back(tmp_path: Path, capsys):
    async with AsyncExitStack() as stack:
        engine = await FakeEngine(name="a").start()
        stack.push_async_callback(engine.stop)
        assert await asyncio.to_thread(cli.main, route(engine, tmp_path, "--envoy-config")) == 0
        (tmp_path / "mine.json").write_text(capsys.readouterr().out)
        picker = await router(stack, engine, tmp_path)
        await spawn(
            stack, find_envoy(), "-c", str(tmp_path / "mine.json"), "--disable-hot-restart", "--concurrency", "1",
            "--log-level", "error",
        )  # fmt: skip
        admin = Admin(tmp_path / "admin.http")
        await until_ready(admin)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{await admin.port()}")
        stack.push_async_callback(channel.close)
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert await settled(stub) == [6, 7]
        os.kill(picker.pid, signal.SIGKILL)
        await picker.wait()
        forged = (("x-gateway-destination-endpoint", engine.address),)
        for metadata in ((), forged):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tokens_of(stub.Generate(generate_request(2), metadata=metadata))
            assert caught.value.code() is Code.UNAVAILABLE
        again = await router(stack, engine, tmp_path)
        assert await settled(stub) == [6, 7]
        again.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(again.wait(), 20) == 0


async def until_ready(admin: Admin) -> None:
    async with asyncio.timeout(20):
        while True:
            with suppress(OSError, aiohttp.ClientError):
                if await admin.ready():
                    return
            await asyncio.sleep(0.05)


async def settled(stub) -> list[int]:
    """The answer, once the router has reached its engine."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await tokens_of(stub.Generate(generate_request(2)))
            except grpc.aio.AioRpcError as error:
                assert error.code() is Code.UNAVAILABLE
                await asyncio.sleep(0.05)


def test_what_cannot_be_is_said(tmp_path: Path, capsys):
    base = ["route", "--engine", "m@127.0.0.1:1", "--data-plane", "envoy"]
    for more, words in (
        (["--envoy-config"], "needs the --envoy-folder"),
        (["--envoy", "none"], "needs the --envoy-folder"),
        (["--envoy", str(tmp_path / "nowhere")], "is not a program"),
        (["--processes", "2"], "--envoy-workers"),
        (["--secret", str(tmp_path / "none")], "secret cannot be read"),
        (["--envoy-config", "--envoy-folder", "/" + "x" * 120], "too long for Unix sockets"),
    ):
        assert cli.main([*base, *more]) == 2
        assert words in capsys.readouterr().err


def test_the_configuration_says_what_was_asked_for(tmp_path: Path, capsys):
    asked = [
        "--envoy-config",
        "--envoy-folder",
        str(tmp_path),
        "--port",
        "7777",
        "--envoy-filter",
        "ext_proc",
    ]
    assert cli.main(["route", "--engine", "m@127.0.0.1:1", "--data-plane", "envoy", *asked]) == 0
    made = json.loads(capsys.readouterr().out)
    (listener,) = made["static_resources"]["listeners"]
    assert listener["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 7777}
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    names = [item["name"].rpartition(".")[2] for item in manager["http_filters"]]
    assert names == ["ext_proc", "header_mutation", "router"]
    assert not list(tmp_path.iterdir())  # nothing is started or written


async def test_the_endpoint_picker_on_a_port_of_its_own(tmp_path: Path):
    authority = Authority(tmp_path)
    own = authority.sign("picker.test")
    tls = ServerTls(certificate=str(own.certificate), key=str(own.key))
    async with fleet(FakeEngine(name="a")) as f:
        picker = await serve_endpoint_picker(f.router, QUICK, "127.0.0.1:0", tls=tls)
        async with picker as parts:
            credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
            options = [("grpc.ssl_target_name_override", "picker.test")]
            async with grpc.aio.secure_channel(parts.address, credentials, options=options) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(service="readiness"))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(OSError, match="cannot listen"):
            await serve_endpoint_picker(f.router, QUICK, f.router.address)


def test_a_killed_router_leaves_a_folder_only_until_the_next_one_starts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "npufleet-route-envoy-x"
    left.mkdir()
    (left / "engines.json").write_text("{}")
    assert (
        cli.main(["route", "--engine", "m@127.0.0.1:1", "--data-plane", "envoy", "--envoy", "/absent"]) == 2
    )
    assert list(tmp_path.iterdir()) == [], "neither the killed one's nor that of a start that was refused"
