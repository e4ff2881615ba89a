"""Ask a running gateway one question, with the standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
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


def get_json(url: str, timeout: float = 10.0) -> Any:
    """Return the JSON document at ``url``.

    Raises:
        AskError: if there is none.
    """
    return _open(urllib.request.Request(url), timeout)


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
    except (OSError, ValueError) as error:
        raise AskError(f"{request.full_url}: {error}") from error
