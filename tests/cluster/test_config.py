"""FleetConfig: what it accepts, what it refuses and with which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from npufleet.cluster import config, yaml_text
from npufleet.cluster.engine import args as engine_args


def fleet(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"models": [{"name": "m", "source": "/models/m"}]}
    return {**base, **changes}


def model(**changes: Any) -> dict[str, Any]:
    return fleet(models=[{"name": "m", "source": "/models/m", **changes}])


def connected(connector: str, **more: str) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": connector, **more}} if connector else {}


def pair(prompts: str, answers: str) -> dict[str, Any]:
    """Two deployments of one name that hand prompts over by these connectors."""
    deployments = [
        {"name": "m", "engine": connected(answers), "role": "decode" if answers else "both"},
        {"name": "p", "engine": connected(prompts), "role": "prefill", "serves": "m"},
    ]
    return fleet(models=[{"source": "/models/m", **each} for each in deployments])


def test_defaults_are_loopback_and_one_engine() -> None:
    made = config.from_dict(fleet())
    assert (made.gateway.host, made.router.host, made.metrics.host) == ("127.0.0.1",) * 3
    assert made.models[0].engines == 1
    assert made.device == "npu"
    assert made.npus == 1


def test_plain_data_reads_back_equal() -> None:
    made = config.from_dict(
        model(engines=3, engine={"tensor_parallel_size": 2, "max_model_len": 64})
        | {"device": "virtual", "router": {"policy": "round-robin", "port": 0}, "gateway": {"api_keys": "/k"}}
    )
    assert config.from_dict(made.to_dict()) == made
    assert made.npus == 6


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "expected a mapping, got list"),
        ({}, "expected a list of at least one model"),
        (fleet(modls=1), "unknown key 'modls'; did you mean 'models'?"),
        (fleet(device="gpu"), "expected one of npu, virtual, got 'gpu'"),
        (fleet(name=""), "expected a non-empty text"),
        (fleet(gateway={"port": 70000}), "expected an integer from 0 to 65535, got 70000"),
        (fleet(gateway={"port": True}), "got True"),
        (fleet(gateway={"prot": 1}), "did you mean 'port'?"),
        (fleet(router={"policy": "best"}), "sticky-session, got 'best'"),
        (fleet(router=[]), "fleet.router: expected a mapping"),
        (model(engines=0), "fleet.models[0].engines: expected an integer from 1"),
        (model(name="a#b"), "expected letters, digits and any of"),
        (model(name="../b"), "a letter or digit first"),
        (model(source="-rf"), "expected the folder of a checkpoint"),
        (model(source="/a\nb"), "expected the folder of a checkpoint"),
        (model(engines={"min": 3, "max": 2}), "min is 3, above max"),
        (model(engines={"least": 3, "max": 2}), "unknown key 'least'"),
        (model(role="prefil"), "did you mean 'prefill'?"),
        (model(role="prefill"), "must be a mapping that names a kv_connector"),
        (
            model(role="decode", engine={"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}),
            "cannot hand prompts over by 'OffloadingConnector'",
        ),
        (
            model(role="prefill", engine={"kv_transfer_config": {"kv_connector": "NixlConnector"}}),
            "has prefill engines only",
        ),
        (
            pair("NixlConnector", "MooncakeConnector"),
            "but hands them over by NixlConnector, not by MooncakeConn",
        ),
        (
            pair("NixlConnector", ""),
            "'p' computes prompts for 'm', but hands them over by NixlConnector, not by no",
        ),
        (
            model(role="decode", engine=connected("NixlConnector", kv_role="kv_producer")),
            "kv_role: expected one of kv_both, kv_consumer, got 'kv_producer'",
        ),
        (model(serves="other"), "serves 'other', which is no deployment of its own"),
        (model(engine={"tensor_paralel_size": 2}), "did you mean 'tensor_parallel_size'?"),
        (model(engine={"tensor_parallel_size": 0}), "expected an integer from 1 to 1024, got 0"),
        (model(engine={"data_parallel_size": 0}), "data_parallel_size: expected an integer from 1 to 1024"),
        (model(engine={"data_parallel_rank": 1}), "set data_parallel_size, the fleet places and joins"),
        (model(engine={"pipeline_parallel_size": "x"}), "pipeline_parallel_size: expected an integer"),
        (model(engine={"prefill_context_parallel_size": 2}), "prefill_context_parallel_size is 2"),
        (
            model(engine={"tensor_parallel_size": 3, "decode_context_parallel_size": 2}),
            "decode_context_parallel_size is 2, which does not divide tensor_parallel_size 3",
        ),
        (model(engine={"model": "x"}), "set models[].source"),
        (model(engine={"distributed_executor_backend": "mp"}), "Ray actors"),
        (model(rank_table="yes"), "rank_table"),
        (model(chip=0), "chip: expected a non-empty text, got 0"),
        (model(serves=[]), "serves: expected a non-empty text"),
        (model(engine={"kv_transfer_config": {"kv_connector": 5}}), "names a kv_connector"),
        (model(engine={"kv_transfer_config": {"kv_connector": "c", "kv_role": "x"}}), "kv_both, kv_consumer"),
        (model(engine={"additional_config": {"shared_expert": 1}}), "did you mean 'shared_experts'?"),
        (model(engine={"additional_config": {"moe_communication": "mc3"}}), "did you mean 'mc2'?"),
        (fleet(router=None), "fleet.router: expected a mapping, got nothing"),
        (fleet(router={"hedging": {"max_tokens": "8"}}), "router.hedging.max_tokens: expected an integer"),
        (
            fleet(router={"resume": "gredy"}),
            "router.resume: expected one of all, greedy, off, got 'gredy'; did",
        ),
        (fleet(router={"otlp_endpoint": "collector"}), "expected http://HOST:4317, got 'collector'"),
        (fleet(router={"otlp_endpoint": "http://c:99999"}), "expected http://HOST:4317"),
        (fleet(gateway={"host": "a\0b"}), "gateway.host: expected an address such as"),
        (fleet(gateway={"host": "\u00e9"}), "gateway.host: expected an address such as"),
        (fleet(gateway={"api_keys": "a\0b"}), "gateway.api_keys: expected the path of a file"),
        (fleet(gateway={"tls": {"certificate": "/c", "key": "\n"}}), "tls.key: expected a non-empty text"),
        (fleet(device="x" * 5000), "… (5002 characters)"),
        (fleet(**{"x" * 5000: 1}), "… (5002 characters)"),
        (model(rank_table=True, engine={"data_parallel_size": 2}), "describes one group of ranks"),
        (fleet(models=[{"name": "m"}]), "fleet.models[0].source"),
        (fleet(models=[{"name": "m", "source": "a"}, {"name": "m", "source": "b"}]), "given twice"),
    ],
)
def test_refusals_name_the_place_and_the_way_out(data: object, said: str) -> None:
    with pytest.raises(ValueError) as error:
        config.from_dict(data)
    assert said in str(error.value)


def test_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("models: [{name: m, source: /m, engines: 2}]\nrouter: {policy: round-robin}\n")
    assert config.from_yaml(file).models[0].engines == 2
    file.write_text("models: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        config.from_yaml(file)
    for text, said in [
        ("name: a\nmodels: []\nname: b\n", "in line 3, column 1: the key 'name' is given twice"),
        ("a: [b\n", "in line 2, column 1: expected ',' or ']'"),
        ("a: \0", "special characters are not allowed"),
        ("!!python/object:os.system {}", "could not determine a constructor"),
        ("[" * 5000, "nested too deeply"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=re.escape(said)) as error:
            config.from_yaml(file)
        assert str(error.value).startswith(f"{file}: not valid YAML") and "\n" not in str(error.value)
    assert yaml_text.load("a: &b {port: 0, host: h}\nc: {<<: *b, port: 1}", "x")["c"] == {
        "port": 1,
        "host": "h",
    }
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not valid YAML"):
        config.from_yaml(file)
    with pytest.raises(ValueError, match="no such configuration file"):
        config.from_yaml(tmp_path / "absent.yaml")


def test_overrides_reach_every_level() -> None:
    made = config.with_overrides(
        config.from_dict(fleet()),
        {
            "engines": 2,
            "engine.max_model_len": 128,
            "engine.additional_config.shared_experts": "replicated",
            "router.policy": "round-robin",
            "router.hedging.max_tokens": 8,
            "router.resume": False,  # as YAML reads a bare `off`
            "gateway.tls.certificate": "/c",
            "gateway.tls.key": "/k",
            "name": "x",
        },
    )
    assert made.models[0].engine["additional_config"] == {"shared_experts": "replicated"}
    assert (made.router.hedging.max_tokens, made.router.resume) == (8, "off")
    assert made.gateway.tls is not None and made.gateway.tls.key == "/k"
    assert (made.models[0].engines, made.models[0].engine["max_model_len"]) == (2, 128)
    assert (made.router.policy, made.name) == ("round-robin", "x")


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("router.polcy", "'policy'"),
        ("engine.max_modl_len", "'max_model_len'"),
        ("gatewy.port", "'gateway.port'"),
        ("router.hedging.max_token", "'max_tokens'"),
    ],
)
def test_unknown_override_names_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {near}"):
        config.with_overrides(config.from_dict(fleet()), {key: 1})


def test_known_engine_arguments_are_those_of_the_installed_vllm() -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    assert engine_args.of_engine() == {field.name for field in fields(AsyncEngineArgs)}
    assert "tool_call_parser" in engine_args.of_frontend()
    given = {"max_model_len": 5, "tool_call_parser": "hermes"}
    assert engine_args.engine_part(given) == {"max_model_len": 5}


def test_who_may_ask_and_how_much_is_read_and_checked():
    model = {"models": [{"name": "m", "source": "/m"}]}
    router = {
        "transport": "grpcio",
        "tls": {"certificate": "/c", "key": "/k", "client_ca": "/a"},
        "admission": {"ttft_objective": 2.5, "engine_slots": 8},
        "access_log": True,
        "otlp_endpoint": "http://c:4317",
    }
    made = config.from_dict({**model, "router": router})
    assert made.router.tls is not None and made.router.tls.client_ca == "/a"
    assert (made.router.admission.ttft_objective, made.router.admission.engine_slots) == (2.5, 8)
    assert config.from_dict(made.to_dict()) == made
    for wrong, message in [
        ({"transport": "http"}, "router.transport.*did you mean 'http2'"),
        ({"tls": {"certificate": "/c"}}, "router.tls.key"),
        ({"tls": {"cert": "/c"}}, "unknown key 'cert'"),
        ({"admission": {"max_queue": 0}}, "router.admission.max_queue: expected an integer from 1"),
        ({"admission": {"slots": 1}}, "unknown key 'slots'"),
        ({"access_log": "yes"}, "router.access_log: expected true or false"),
    ]:
        with pytest.raises(ValueError, match=message):
            config.from_dict({**model, "router": wrong})
