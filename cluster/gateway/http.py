"""Small pieces of HTTP that the dispatcher needs: ASGI messages, errors in OpenAI's form, bounded bodies."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

import msgspec

from ..admission.tenants import Keys, Tenant

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class HttpError(Exception):
    """An answer that is an error; ``param`` names the offending member of the request."""

    def __init__(self, status: HTTPStatus, message: str, *, kind: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or status.phrase
        self.param = param

    def body(self) -> bytes:
        """The error as the OpenAI API writes it."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status.value}
        return json.dumps({"error": error}).encode()


class ClientGone(Exception):
    """The client left before its request was read."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header ``name`` (lower case) of a request."""
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


async def respond(send: Send, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    """Send a whole answer."""
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole request body. Raises :class:`HttpError` 413 above ``limit`` bytes, :class:`ClientGone`."""
    too_large = HttpError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request body may be at most {limit} bytes"
    )
    told = header(scope, b"content-length")
    if told is not None and told.isdigit() and int(told) > limit:
        raise too_large
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives ``body`` first and then whatever the connection says (its end)."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


class _Named(msgspec.Struct):
    model: Any = None


_decoder = msgspec.json.Decoder(_Named)


def model_in(body: bytes) -> str | None:
    """The member ``model`` of a JSON body; None where there is none. Raises :class:`HttpError` 400."""
    if not body:
        return None
    try:
        model = _decoder.decode(body).model
    except msgspec.ValidationError:
        return None  # JSON, but no object: the endpoint says what it wants
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(
            HTTPStatus.BAD_REQUEST, f"the request body is not valid JSON: {error}", kind="BadRequestError"
        ) from error
    if model is not None and not isinstance(model, str):
        raise HttpError(
            HTTPStatus.BAD_REQUEST,
            f"model must be a string, got {type(model).__name__}",
            kind="BadRequestError",
            param="model",
        )
    return model


def tenant_of(keys: Keys, scope: Scope) -> Tenant:
    """Whose request it is. Raises :class:`HttpError` 401 for one without a good key."""
    tenant = keys.tenant_of((name.decode("latin-1"), value) for name, value in scope["headers"])
    if tenant is None:
        raise HttpError(HTTPStatus.UNAUTHORIZED, "a valid API key is needed: Authorization: Bearer KEY")
    return tenant
