"""Parts of the gateway that need no process of their own: keys, bodies, files, arguments, settings."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from npufleet.cluster.folder import Folder
from npufleet.cluster.gateway.bundle import make_folder
from npufleet.cluster.gateway.dispatch import Dispatcher
from npufleet.cluster.gateway.frontend import parse_args
from npufleet.cluster.gateway.http import HttpError, model_in, respond
from npufleet.cluster.gateway.metrics import GatewayMetrics
from npufleet.cluster.gateway.process import GATEWAY_ENV
from npufleet.cluster.gateway.server import bind
from npufleet.cluster.gateway.settings import GatewaySettings, ModelSpec
from tests.fakes.tokenizer import make_tokenizer_dir


async def echo_app(scope: Any, receive: Any, send: Any) -> None:
    """Stands for a model's frontend: answers with the body it got."""
    message = await receive()
    await respond(send, 200, message.get("body", b"") or b"{}")


async def broken_app(scope: Any, receive: Any, send: Any) -> None:
    raise ZeroDivisionError("boom")


def slot(name: str, app: Any = echo_app, engines: int = 1) -> Any:
    async def cards() -> list[dict[str, Any]]:
        return [{"id": name}]

    frontend = None if app is None else SimpleNamespace(app=app, core=SimpleNamespace(active=0))
    return SimpleNamespace(
        spec=ModelSpec(name=name),
        frontend=frontend,
        answer=app,
        engines=engines,
        problem="it is being built",
        cards=cards,
    )


def client(*slots: Any, **settings: Any) -> httpx.AsyncClient:
    """A client of a dispatcher over ``slots``."""
    named = {made.spec.name: made for made in slots}
    app = Dispatcher(named, GatewaySettings(**settings), GatewayMetrics())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


async def test_requests_go_to_the_model_they_name() -> None:
    async with client(slot("a", broken_app), slot("b")) as api:
        answer = await api.post("/v1/completions", json={"model": "b", "x": 1})
        assert answer.json() == {"model": "b", "x": 1}
        answer = await api.post("/v1/completions", json={"model": "a"})
        assert answer.status_code == 500
        assert "ZeroDivisionError" in answer.json()["error"]["message"]
        assert "boom" not in answer.text


async def test_a_model_without_frontend_or_engine_is_a_503_that_says_why() -> None:
    async with client(slot("a", None), slot("b", engines=0), retry_after=7.0) as api:
        answer = await api.post("/v1/completions", json={"model": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
        assert "being built" in answer.json()["error"]["message"]
        answer = await api.post("/v1/completions", json={"model": "b"})
        assert answer.status_code == 503
        assert (await api.post("/tokenize", json={"model": "b"})).status_code == 200  # needs no engine
        assert (await api.get("/health")).status_code == 503
        assert [card["id"] for card in (await api.get("/v1/models")).json()["data"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic secret"}, 401),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "bearer other"}, 200),
        ({"x-api-key": "secret"}, 200),
    ],
)
async def test_api_keys(headers: dict[str, str], status: int) -> None:
    async with client(slot("a"), api_keys=("secret", "other")) as api:
        answer = await api.post("/v1/completions", json={"model": "a"}, headers=headers)
        assert answer.status_code == status
        assert (await api.get("/v1/models", headers=headers)).status_code == status
        assert (await api.get("/health")).status_code == 200
        assert (await api.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b"", None),
        (b"{}", None),
        (b'{"model": "m", "x": [1, {"model": "n"}]}', "m"),
        (b"[1]", None),
        (b"3", None),
    ],
)
def test_the_model_of_a_body(body: bytes, model: str | None) -> None:
    assert model_in(body) == model


@pytest.mark.parametrize(
    "body", [b"{", b"\xff", b'{"model": "m"', b"{" * 5000 + b"}" * 5000, b'{"model": []}']
)
def test_a_body_that_makes_no_sense(body: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        model_in(body)
    assert caught.value.status is HTTPStatus.BAD_REQUEST


def archive(**files: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as bundle:
        for name, content in files.items():
            bundle.writestr(name.replace("__", "/").replace("_json", ".json"), content)
    return data.getvalue()


def test_an_archive_becomes_a_directory_without_quantization() -> None:
    made = make_folder(None, archive(config_json='{"a": 1, "quantization_config": {"bits": 8}}', x_json="{}"))
    assert json.loads((made.path / "config.json").read_text()) == {"a": 1}
    assert sorted(path.name for path in made.path.iterdir()) == ["config.json", "x.json"]
    made.close()
    assert not made.path.exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no zip", "not a zip"),
        (archive(x_json="{}"), "no config.json"),
        (archive(config_json="{}", **{"..__evil": "x"}), "no plain file"),
        (archive(config_json="{}", **{"__etc__evil": "x"}), "no plain file"),
    ],
)
def test_archives_that_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_folder(None, data)


def test_a_checkpoint_directory_is_copied_without_weights(tmp_path: Path) -> None:
    source = make_tokenizer_dir(tmp_path / "model")
    (source / "model.safetensors").write_bytes(b"x" * 10)
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "modeling_own.py").write_text("")
    made = make_folder(str(source), None)
    names = {path.name for path in made.path.iterdir()}
    made.close()
    assert names == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "modeling_own.py",
    }  # fmt: skip


HOLDER = """
import sys, time
from npufleet.cluster.folder import Folder

print(Folder('npufleet-x-').path, flush=True)
time.sleep(600)
"""


def test_a_killed_gateways_folder_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        mine = Folder("npufleet-x-")
        assert held.is_dir(), "the folder of a living process was removed"
        holder.kill()
    other = Folder("npufleet-x-")
    assert not held.exists()
    assert mine.path.is_dir()
    for folder in (mine, other):
        folder.close()
        folder.close()
    assert list(tmp_path.iterdir()) == []


def test_frontend_arguments_are_taken_and_the_engines_own_left(tmp_path: Path) -> None:
    args = {
        "tensor_parallel_size": 4, "gpu_memory_utilization": 0.5, "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes", "default_chat_template_kwargs": {"x": 1}, "chat_template": None,
    }  # fmt: skip
    parsed = parse_args(ModelSpec(name="m", args=args), make_tokenizer_dir(tmp_path))
    assert (parsed.enable_auto_tool_choice, parsed.tool_call_parser) == (True, "hermes")
    assert parsed.default_chat_template_kwargs == {"x": 1}
    assert parsed.served_model_name == ["m"]
    assert parsed.tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tool_call_parserr": "x"}, "did you mean tool_call_parser"),
        ({"response_role": ["a", "b"]}, "takes one: 'b'"),
        ({"tokenizer_mode": {"a": 1}, "max_logprobs": "many"}, "max.logprobs"),
    ],
)
def test_wrong_frontend_arguments(tmp_path: Path, args: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_args(ModelSpec(name="m", args=args), make_tokenizer_dir(tmp_path))


def test_settings_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="max_attempts"):
        GatewaySettings(max_attempts=0)
    with pytest.raises(ValueError, match="70000"):
        GatewaySettings(port=70000)
    with pytest.raises(ValueError, match="name"):
        ModelSpec(name="")


def test_a_port_in_use_is_named() -> None:
    held = bind("127.0.0.1", 0)
    held.listen()
    port = held.getsockname()[1]
    with pytest.raises(OSError, match=str(port)):
        bind("127.0.0.1", port)
    held.close()


@pytest.mark.parametrize(
    ("change", "code"),
    [({}, 0), ({"VLLM_TARGET_DEVICE": ""}, 1), ({"VLLM_PLUGINS": "npufleet"}, 1)],
)
def test_a_process_that_is_not_prepared_is_refused(change: dict[str, str], code: int) -> None:
    program = (
        "import sys; from npufleet.cluster.gateway.process import prepare_process as p; p(); p();"
        "assert sys.modules['torch_npu'] is None"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**GATEWAY_ENV, **change},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == code, ended.stderr
    if code:
        assert "must be started with" in ended.stderr
