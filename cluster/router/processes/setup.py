"""What a router process is told by its parent: one line of JSON at its start, then one per set of engines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from npufleet.cluster.admission.settings import AdmissionSettings
from npufleet.cluster.router.hedge import HedgeSettings
from npufleet.cluster.router.registry import DEFAULT_POLICY
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.tls import ServerTls
from npufleet.cluster.transport.base import Tls
from npufleet.cluster.transport.registry import DEFAULT_TRANSPORT


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One router process. Files are named, not carried, so that no secret is in a command line or a pipe."""

    host: str
    port: int
    policy: str = DEFAULT_POLICY
    transport: str = DEFAULT_TRANSPORT
    front: str = RouterSettings.front
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    split_tokens: int = RouterSettings.split_tokens
    hedging: HedgeSettings = field(default_factory=HedgeSettings)
    resume: str = RouterSettings.resume
    keys: str | None = None  # file of API keys
    secret: str | None = None  # file of the fleet's secret
    tls: ServerTls | None = None
    engine_tls: Tls | None = None
    access_log: bool = False
    otlp_endpoint: str | None = None
    warm: float = 0.0  # seconds for engines to be reached before it takes calls
    shares: str = ""  # file of shares.py; "": the process knows of no others
    row: int = 0  # its own in there
    rows: int = 1
    grace: float = 30.0  # seconds for running calls to end

    def to_line(self) -> bytes:
        """As one line."""
        return json.dumps(asdict(self), default=str).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Setup:
        """What :meth:`to_line` made."""
        data: dict[str, Any] = json.loads(line)
        tls, link = data.pop("tls"), data.pop("engine_tls")
        return cls(
            **{
                **data,
                "admission": AdmissionSettings(**data["admission"]),
                "hedging": HedgeSettings(**data["hedging"]),
            },
            tls=None if tls is None else ServerTls(**tls),
            engine_tls=None
            if link is None
            else Tls(**{key: _path(key, value) for key, value in link.items()}),
        )


def _path(key: str, value: str | None) -> Any:
    return value if value is None or key == "server_name" else Path(value)
