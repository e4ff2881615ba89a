"""Signed, short-lived tokens for calls to engines: JSON Web Tokens (RFC 7519) under HMAC with SHA-256.

A token's audience is one engine, for a client that the router sent there, or the whole fleet, for the router's
own calls; the latter are never handed out. Engines of a fleet with a secret take no call that costs them work
without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jwt

TOKEN_KEY = "x-npufleet-token"
"""Request metadata that carries the token."""

_ALGORITHM = "HS256"
_ISSUER = "npufleet-router"
_FLEET = "npufleet:engines"
_OWN_SECONDS = 60.0  # life of the router's own tokens
LEEWAY = 2.0  # seconds by which clocks of two nodes may differ
_SHORTEST = 32  # bytes of a secret: as many as the hash has (RFC 7518, 3.2)


class TokenError(Exception):
    """A token that an engine does not accept; ``foreign`` where it is a good token of another engine."""

    def __init__(self, message: str, *, foreign: bool = False) -> None:
        super().__init__(message)
        self.foreign = foreign


def read_secret(file: str | Path) -> bytes:
    """The fleet's secret in ``file``, without blanks around it. ValueError where there is none or it is short."""
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"the fleet's secret cannot be read from {file}: {error.strerror}") from error
    if len(secret) < _SHORTEST:
        raise ValueError(
            f"the fleet's secret in {file} has {len(secret)} bytes; at least {_SHORTEST} are needed, "
            "for example from: openssl rand -base64 48"
        )
    return secret


class TokenMint:
    """Signs tokens. ``clock`` is seconds since the epoch."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self._clock = clock
        self._own = ""
        self._renew = 0.0

    def route(self, engine_id: str, route_id: str, seconds: float) -> str:
        """A token with which the call of ``route_id`` may begin on that engine within ``seconds``."""
        return self._sign(engine_id, seconds, jti=route_id)

    def fleet(self) -> str:
        """A token for the router's own calls to any engine."""
        now = self._clock()
        if now >= self._renew:
            self._own = self._sign(_FLEET, _OWN_SECONDS)
            self._renew = now + _OWN_SECONDS / 2
        return self._own

    def _sign(self, audience: str, seconds: float, **more: str) -> str:
        claims = {"iss": _ISSUER, "aud": audience, "exp": self._clock() + seconds, **more}
        return jwt.encode(claims, self._secret, algorithm=_ALGORITHM)


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What a good token says."""

    route: str | None  # the one route it is for; None: it is the router's own
    expires: float  # seconds since the epoch after which it is not accepted any more


def check_token(token: str, secret: bytes, engine_id: str) -> Claims:
    """What ``token`` says; :class:`TokenError` unless it lets a call of ``engine_id`` begin now."""
    if not token:
        raise TokenError(
            f"this engine takes calls with a token only (metadata {TOKEN_KEY!r}); ask the router for one"
        )
    try:
        found = jwt.decode(
            token,
            secret,
            algorithms=[_ALGORITHM],
            audience=[engine_id, _FLEET],
            issuer=_ISSUER,
            leeway=LEEWAY,
            options={"require": ["exp", "aud", "iss"]},
        )
    except jwt.ExpiredSignatureError as error:
        raise TokenError("the token has expired; ask the router for a new one") from error
    except jwt.InvalidAudienceError as error:
        raise TokenError(f"the token is not for engine {engine_id!r}", foreign=True) from error
    except jwt.InvalidTokenError as error:
        raise TokenError(f"the token is not valid: {error}") from error
    if found["aud"] == _FLEET:
        return Claims(route=None, expires=found["exp"] + LEEWAY)
    if not isinstance(found.get("jti"), str):
        raise TokenError("the token is not valid: it names no route")
    return Claims(route=found["jti"], expires=found["exp"] + LEEWAY)
