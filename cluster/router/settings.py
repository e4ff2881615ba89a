"""Every number the router can be tuned with, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from npufleet.cluster import checks
from npufleet.cluster.admission.settings import AdmissionSettings
from npufleet.cluster.proto.extension import METADATA_LIMIT
from npufleet.cluster.router.hedge import HedgeSettings
from npufleet.cluster.router.replay.rules import DEFAULT_RESUME, MODES
from npufleet.cluster.transport.base import LinkSettings, Tls
from npufleet.cluster.transport.registry import DEFAULT_TRANSPORT, check_transport

FRONTS = ("grpcio", "http2")
_MIB = 1 << 20

WARM_SECONDS = 10.0
"""How long a router or gateway that shares its port keeps it closed at most while it learns of engines."""


def front_of(data_plane: str) -> str:
    """The server behind the port of a data plane; behind Envoy it has little to do."""
    return data_plane if data_plane in FRONTS else FRONTS[0]


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Times are seconds, sizes are bytes. A value that is not positive is a ValueError."""

    # The link to an engine
    transport: str = DEFAULT_TRANSPORT  # a name of transport/registry.py
    tls: Tls | None = None  # None: engines are reached without TLS
    secret: bytes | None = field(
        default=None, repr=False
    )  # engines of a fleet with one take signed calls only
    keepalive_time: float = 5.0  # a ping goes out after this much silence
    keepalive_timeout: float = 2.0  # and the engine counts as lost when it is not answered within this
    reconnect_backoff: float = 1.0  # the longest pause between two connection attempts
    # Health
    probe_interval: float = 1.0  # between health checks of an engine that is well
    probe_timeout: float = 2.0
    probe_misses: int = 3  # checks that may time out in a row before a busy engine counts as lost
    recovery_interval: float = 0.5  # between health checks of an engine that is not well
    breaker_failures: int = 5  # internal errors in a row after which an engine rests, if there is another one
    stall_timeout: float = 30.0  # silence of an engine that decodes requests before it counts as stuck
    first_stall_timeout: float = 600.0  # and of one whose requests all wait for their first message
    # Load
    load_interval: float = (
        1.0  # between GetLoads calls, give or take a fifth: routers shall not march in step
    )
    load_ttl: float = 5.0  # a report older than this is not believed
    # Admission
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    # Clients
    front: str = FRONTS[0]  # the server that they connect to: grpcio's or our own
    # Requests
    max_attempts: int = 3  # engines that one request may try, all before its first output
    retry_budget: int = 256  # retries in reserve for all requests; a fifth of one comes back per success
    request_timeout: float = 3600.0  # of a Generate or Embed that brings no deadline
    control_timeout: float = 30.0  # of any other call that brings none
    max_request_bytes: int = 64 * _MIB
    max_metadata_bytes: int = METADATA_LIMIT
    max_streams: int = 8192  # concurrent calls; more are refused with RESOURCE_EXHAUSTED
    split_tokens: int = 512  # uncached prompt tokens from which on a prefill engine computes a prompt
    hedging: HedgeSettings = field(default_factory=HedgeSettings)
    resume: str = (
        DEFAULT_RESUME  # which broken streams another engine goes on with: a mode of replay/rules.py
    )
    # Telling
    access_log: bool = False  # a line per call on the logger npufleet.access
    otlp_endpoint: str | None = (
        None  # http://HOST:4317 of a collector of traces; None: contexts only pass through
    )
    # Leaving
    leave_timeout: float = 600.0  # how long streams of an engine that left the fleet may run on
    model_memory: float = 300.0  # how long a model without any endpoint counts as unavailable, not as unknown

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"router setting {item.name} must be above 0, got {value!r}")
        check_transport(self.transport)
        if self.front not in FRONTS:
            raise ValueError(f"unknown front {self.front!r}; there is: {', '.join(FRONTS)}")
        checks.choice(self.resume, "router setting resume", MODES)

    def link(self) -> LinkSettings:
        """What of this concerns the links to engines."""
        return LinkSettings(
            keepalive_time=self.keepalive_time,
            keepalive_timeout=self.keepalive_timeout,
            reconnect_backoff=self.reconnect_backoff,
            max_metadata_bytes=self.max_metadata_bytes,
        )
