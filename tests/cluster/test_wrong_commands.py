"""Wrong command lines of what runs without a fleet: one clear line, exit code 2, nothing started."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from npufleet.cluster import cli
from npufleet.cluster.gateway import __main__ as gateway

ENGINE = ("route", "--port", "0", "--engine", "m@127.0.0.1:1")

WRONG: list[tuple[tuple[str, ...], str]] = [
    (("route", "--engine", "m@h:1", "--port", "-1"), "--port: expected an integer from 0 to 65535, got -1"),
    (("route", "--engine", "m@h:1", "--port", "99999"), "--port: expected an integer from 0 to 65535"),
    ((*ENGINE, "--host", "\u00e9"), "--host: expected an address such as 127.0.0.1"),
    ((*ENGINE, "--host", ""), "--host: expected a non-empty text"),
    ((*ENGINE, "--metrics-port", "99999"), "--metrics-port: expected an integer"),
    ((*ENGINE, "--metrics-port", "TAKEN"), "the metrics cannot listen on 127.0.0.1:"),
    ((*ENGINE, "--grace", "nan"), "--grace: expected a number from 0"),
    ((*ENGINE, "--processes", "0"), "--processes: expected an integer from 1 to 256"),
    ((*ENGINE, "--processes", "100000"), "--processes: expected an integer from 1 to 256"),
    ((*ENGINE, "--envoy-workers", "0"), "--envoy-workers: expected an integer"),
    ((*ENGINE, "--otlp-endpoint", "collector"), "--otlp-endpoint: expected http://HOST:4317"),
    ((*ENGINE, "--endpoint-picker", "9002"), "--endpoint-picker: expected HOST:PORT, got '9002'"),
    ((*ENGINE, "--ttft-objective", "nan"), "ttft_objective: expected a number"),
    ((*ENGINE, "--hedge-tokens", "-1"), "max_tokens: expected an integer from 0"),
    ((*ENGINE, "--engine-ca", "/absent"), "the TLS files for engines cannot be used (/absent)"),
    ((*ENGINE, "--engine-key", "/absent"), "a certificate and its key are given together"),
    ((*ENGINE, "--engine-name", "e"), "--engine-name is of engines that speak TLS"),
    ((*ENGINE, "--data-plane", "envoy", "--envoy", "/tmp"), "/tmp is not a program that can be run as Envoy"),
    (
        ("route", "--engines-kubernetes", "s", "--kubernetes-api", "x"),
        "--kubernetes-api: expected http://HOST",
    ),
    (("sim-engine", "--port", "99999"), "--port: expected an integer from 0 to 65535"),
    (("sim-engine", "--port", "65534", "--engines", "3"), "--port of the last engine: expected an integer"),
    (("sim-engine", "--port", "TAKEN"), "--host, --port: engine cannot listen on 127.0.0.1:"),
    (("sim-engine", "--host", "8.8.8.8"), "--host, --port: engine cannot listen on 8.8.8.8:0"),
    (("sim-engine", "--slow", "nan"), "--slow: expected a number"),
    (("sim-engine", "--slow", "1e300"), "--slow: expected a number"),
    (("sim-engine", "--kv-tokens", "0"), "--kv-tokens must be two blocks (256) to 1,073,741,824, got 0"),
    (("sim-engine", "--block-size", "17"), "--block-size must be a multiple of 16"),
    (("sim-engine", "--max-model-len", "0"), "--max-model-len: expected an integer from 1"),
    (("sim-engine", "--model", "/tmp"), "--model /tmp: expected a folder with tokenizer and config.json"),
    (("sim-engine", "--name", "a\nb"), "--name: expected letters, digits"),
    (("plan", "memory", "MODEL", "--hbm", "inf"), "--hbm is inf; expected more than 0"),
    (("plan", "memory", "MODEL", "--hbm", "nan"), "--hbm is nan; expected more than 0"),
    (("plan", "memory", "MODEL", "--gpu-memory-utilization", "0"), "gpu_memory_utilization is 0.0"),
    (("plan", "placement", "FLEET", "--servers", ""), "--servers '': expected KIND=NUMBER"),
    (("plan", "placement", "FLEET", "--servers", "a3=99999999"), "from 1 to 4,096 of one of a2"),
    (("plan", "placement", "FLEET", "--servers", "a3=\u00b2"), "from 1 to 4,096 of one of a2"),
    (("doctor", "--nodes", ""), "--nodes: expected a non-empty text"),
    (("doctor", "--expect", "3"), "give --nodes all too"),
    (("node", "--file", "NODE"), "npus is '0-99999999999': '0-99999999999' is no list of NPU indices"),
]
QWEN = {
    "model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64,
    "intermediate_size": 128, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_one_line_says_what_is_wrong(
    words: tuple[str, ...], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = {"MODEL": tmp_path / "config.json", "FLEET": tmp_path / "f.yaml", "NODE": tmp_path / "n.yaml"}
    places["MODEL"].write_text(json.dumps(QWEN))
    places["FLEET"].write_text(f"models: [{{name: m, source: {tmp_path}}}]")
    places["NODE"].write_text("npus: 0-99999999999")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        named = {**{key: str(file) for key, file in places.items()}, "TAKEN": str(taken.getsockname()[1])}
        assert cli.main([named.get(word, word) for word in words]) == 2
    *_, line = capfd.readouterr().err.strip().splitlines()
    assert said in line and "error: " in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "5"), "--set: expected a mapping, got int 5"),
        (("--set", '{"prt": 1}'), "--set: unknown key 'prt'; did you mean 'port'?"),
        (("--set", '{"port": "x"}'), "gateway setting port: expected an integer"),
        (("--set", '{"retry_after": NaN}'), "gateway setting retry_after: expected a number"),
        (("--set", '{"tls": 5}'), "--set: tls: expected a mapping"),
        (("--args", "[]"), "--args: expected a mapping"),
    ],
)
def test_a_gateway_alone(words: tuple[str, ...], said: str) -> None:
    options = gateway.parser().parse_args(["--engine", "m@127.0.0.1:1", *words])
    with pytest.raises(ValueError, match=re.escape(said)):
        gateway.settings_of(options)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", "x"), ("num_key_value_heads", -1), ("head_dim", 1.5), ("max_position_embeddings", 0),
        ("num_attention_heads", 0), ("hidden_size", 0), ("vocab_size", 0), ("partial_rotary_factor", "x"),
        ("rope_scaling", {"type": "yarn"}), ("rope_scaling", {"type": "yarn", "factor": "x"}),
    ],
)  # fmt: skip
def test_a_model_with_impossible_numbers(
    key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**QWEN, key: value}))
    assert cli.main(["plan", "memory", str(file)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert (key if key != "rope_scaling" else "factor of YaRN") in line
