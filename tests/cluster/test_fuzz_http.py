"""The HTTP front under mutated requests: no 5xx that a request caused, and nobody else notices.

``test_the_openapi_description_holds`` lets schemathesis make requests from the gateway's own OpenAPI description; the
others mutate whole requests, and whole connections, by hand.
"""

from __future__ import annotations

import copy
import json
import random
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings

from tests.fakes.fleet import Fleet

VALUES: list[Any] = [
    None, True, -1, 0, 1e308, 2**63, -(2**63), "", "x" * 5000, "\ud800", "\x00", [], [[]], {}, {"a": {"b": []}},
    ["a", 1, None], {"type": "json_object"}, "auto", 0.5, "NaN",
]  # fmt: skip
CHAT: dict[str, Any] = {
    "model": "alpha",
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}],
    "max_tokens": 3,
    "temperature": 0.5,
    "stop": ["zz"],
    "logit_bias": {"5": 1.0},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "stream": False,
    "n": 1,
    "seed": 1,
}
COMPLETION: dict[str, Any] = {
    "model": "alpha",
    "prompt": "hello",
    "max_tokens": 3,
    "echo": False,
    "logprobs": 1,
}
RESPONSES: dict[str, Any] = {"model": "alpha", "input": "hello", "max_output_tokens": 3}
MESSAGES: dict[str, Any] = {
    "model": "alpha",
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "hello"}],
}
TOKENIZE: dict[str, Any] = {"model": "alpha", "prompt": "hello"}
SEEDS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/tokenize": TOKENIZE,
}


def mutated(body: Any, rng: random.Random) -> Any:
    """``body`` with one or two members replaced, removed, doubled or added, at any depth."""
    made = copy.deepcopy(body)
    for _ in range(rng.randint(1, 2)):
        node = made
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.6:
                node = node[key]
                continue
            match rng.randint(0, 3):
                case 0:
                    node[key] = copy.deepcopy(rng.choice(VALUES))
                case 1:
                    del node[key]
                case 2 if isinstance(node, list):
                    node.extend(node)
                case _:
                    if isinstance(node, dict):
                        node[rng.choice(["", "x", "model", "stream", "n", "min_tokens"])] = rng.choice(VALUES)
            break
    return made


def refused_or_served(answer: httpx.Response, what: object) -> None:
    assert answer.status_code < 500 or answer.status_code == 501, (
        f"{answer.status_code} {answer.text[:500]} {what}"
    )


@pytest.mark.parametrize("path", list(SEEDS))
def test_mutated_bodies_are_the_clients_fault(fleet: Fleet, path: str) -> None:
    rng = random.Random(path)
    with httpx.Client(base_url=fleet.url, timeout=30) as client:
        for _ in range(150):
            body = mutated(SEEDS[path], rng)
            raw = json.dumps(body).encode()
            answer = client.post(path, content=raw, headers={"content-type": "application/json"})
            refused_or_served(answer, raw[:2000])
        for raw in (
            b"",
            b"{",
            b"[]",
            b"null",
            b'"x"',
            b"\xff\xfe",
            b"{" * 20_000,
            b'{"model": "alpha", "model": 1}',
        ):
            refused_or_served(client.post(path, content=raw), raw[:60])
        served = client.post("/v1/completions", json=COMPLETION)
        assert served.status_code == 200, served.text


def test_broken_connections_disturb_nobody(fleet: Fleet) -> None:
    where = urlsplit(fleet.url)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    attacks = [
        b"\x00" * 2000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        head + b"Content-Length: 99999999999999999999\r\n\r\n",
        head + b"Content-Length: -1\r\n\r\n{}",
        head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        head + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        head + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
        head + b"Content-Length: 100\r\n\r\n{",
        b"\r\n" * 5000,
    ]
    for attack in attacks * 3:
        with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
            connection.settimeout(0.3)
            try:
                connection.sendall(attack)
                answer = connection.recv(1 << 16)
                assert not answer.startswith(b"HTTP/1.1 5"), (attack[:80], answer[:200])
            except (TimeoutError, ConnectionError):
                pass
    assert httpx.post(f"{fleet.url}/v1/completions", json=COMPLETION, timeout=30).status_code == 200


@pytest.mark.slow
def test_the_openapi_description_holds(fleet: Fleet) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    description = httpx.get(f"{fleet.url}/openapi.json", timeout=30).json()
    schema = schemathesis.openapi.from_dict(description)
    schema.config.update(base_url=fleet.url)
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        strategy = operation.as_strategy()

        @hypothesis_settings(
            max_examples=40,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        )
        @given(case=strategy)
        def holds(case: Any) -> None:
            answer = case.call(base_url=fleet.url, timeout=30)
            assert answer.status_code < 500 or answer.status_code == 501, (
                case.path,
                case.body,
                answer.text[:500],
            )

        holds()
        tried += 1
    assert tried > 5
    assert httpx.post(f"{fleet.url}/v1/completions", json=COMPLETION, timeout=30).status_code == 200
