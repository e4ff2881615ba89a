"""Ask a running gateway one question, with the standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from typing import Any


class AskError(RuntimeError):
    """The gateway gave no answer; the text says why."""


def chat(
    gateway: str, model: str, question: str, *, api_key: str | None = None, timeout: float = 60.0
) -> str:
    """Return the answer of ``model`` to one user message, decoded greedily.

    Args:
        gateway: URL such as ``http://127.0.0.1:8000``.
        model: name of the model deployment.
        question: the user message.
        api_key: sent as bearer token if given.
        timeout: seconds.

    Raises:
        AskError: if the gateway does not answer with a chat completion.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 48,
        "temperature": 0,
    }
    answer = _post(f"{gateway}/v1/chat/completions", body, api_key, timeout)
    try:
        return str(answer["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError) as error:
        raise AskError(f"the gateway's answer is not a chat completion: {str(answer)[:400]}") from error


def get_json(base: str, path: str, timeout: float = 10.0) -> Any:
    """Return the JSON document at ``path`` of the server ``base``, a URL such as ``http://127.0.0.1:8001``.

    Raises:
        AskError: if there is none.
        ValueError: if ``base`` is no http or https URL.
    """
    if not _is_base(base):
        raise ValueError(
            f"{base!r} is no URL of a server; expected http://HOST:PORT, http://127.0.0.1:8001 say"
        )
    return _open(urllib.request.Request(f"{base.rstrip('/')}{path}"), timeout)


def _is_base(text: str) -> bool:
    try:
        split = urllib.parse.urlsplit(text)
        split.port  # noqa: B018 - raises for what is no port
    except ValueError:
        return False
    return split.scheme in ("http", "https") and bool(split.hostname) and text.isascii() and " " not in text


def _post(url: str, body: dict[str, Any], api_key: str | None, timeout: float) -> Any:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return _open(urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers), timeout)


def _open(request: urllib.request.Request, timeout: float) -> Any:
    # No proxy: what we ask is this machine or this cluster, whatever HTTP_PROXY says.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise AskError(
            f"{request.full_url}: HTTP {error.code}: {error.read().decode(errors='replace')[:400]}"
        ) from error
    except (OSError, ValueError, HTTPException) as error:  # HTTPException: something that does not speak HTTP
        raise AskError(f"{request.full_url}: {str(error) or type(error).__name__}") from error
