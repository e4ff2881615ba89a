"""Everything the gateway can be tuned with, and what it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import checks
from ..tls import ServerTls

_MIB = 1 << 20
_MOST = 1 << 40


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model deployment as the gateway serves it."""

    name: str  # what clients put into "model"
    source: str | None = None
    """Local directory with config and tokenizer files. None, or a directory that is not on this machine: the
    files are fetched from an engine (GetTokenizer)."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's engine and frontend arguments by their own names with underscores (``tool_call_parser``,
    ``reasoning_parser``, ``chat_template`` ...). Those that only concern an engine are ignored here."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a model deployment needs a name")


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Times are seconds, sizes are bytes."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 picks one
    reuse_port: bool = False  # several gateways of this machine share the port
    api_keys: tuple[str, ...] = ()  # lines of a key file (admission/tenants.py); none: no authentication
    tls: ServerTls | None = None
    max_body_bytes: int = 32 * _MIB  # of one HTTP request; more is a 413
    access_log: bool = False  # a line per request on the logger npufleet.access
    otlp_endpoint: str | None = (
        None  # http://HOST:4317 of a collector of traces; None: contexts only pass through
    )
    short_streams: bool = True  # plain text streams take the shorter way to their bytes (plain.py)
    max_attempts: int = 3  # engines that one request may try, all before anything reached the client
    retry_budget: int = 256  # retries in reserve per model; a fifth of one comes back per success
    first_token_timeout: float = 600.0  # from sending a request to an engine to its first token
    token_gap_timeout: float = 120.0  # between two tokens of a stream
    request_timeout: float = 3600.0  # of a request that is answered in one piece
    control_timeout: float = 30.0  # of GetModelInfo, GetServerInfo and GetTokenizer
    shutdown_grace: float = 30.0  # how long close() lets running requests end
    retry_after: float = 2.0  # told to clients with a 503 where nothing better is known

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes", "max_attempts", "retry_budget", "first_token_timeout", "token_gap_timeout",
            "request_timeout", "control_timeout", "retry_after",
        ):  # fmt: skip
            if not checks.number(getattr(self, name), f"gateway setting {name}", 0.0, _MOST) > 0.0:
                raise ValueError(f"gateway setting {name} must be above 0, got {getattr(self, name)!r}")
        checks.number(self.shutdown_grace, "gateway setting shutdown_grace", 0.0, _MOST)
        checks.port(self.port, "gateway setting port")
        checks.flag(self.reuse_port, "gateway setting reuse_port")
