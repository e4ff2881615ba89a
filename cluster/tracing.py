"""OpenTelemetry traces through router and gateway to the engine (W3C Trace Context).

Without an endpoint nothing is recorded, and a client's own ``traceparent`` and ``tracestate`` go on unchanged. With one
each request is a span of ours, child of the client's, and the engine's spans are children of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CONTEXT_KEYS = ("traceparent", "tracestate")
Pairs = Iterable[tuple[str, str | bytes]]


class Span:
    """One request under way. This one records nothing: it hands the client's context on."""

    def __init__(self, headers: Pairs = ()) -> None:
        self._context = tuple((key, _text(value)) for key, value in headers if key in CONTEXT_KEYS)

    def context(self) -> tuple[tuple[str, str], ...]:
        """The headers that make what comes next a child of it."""
        return self._context

    def end(self, ok: bool, **attributes: str | int | float | bool) -> None:
        """It is over."""


class _Recorded(Span):
    def __init__(self, span: Any, headers: tuple[tuple[str, str], ...]) -> None:
        self._span = span
        self._context = headers

    def end(self, ok: bool, **attributes: str | int | float | bool) -> None:
        from opentelemetry.trace import Status, StatusCode

        for key, value in attributes.items():
            if value not in ("", None):
                self._span.set_attribute(f"npufleet.{key}", value)
        self._span.set_status(Status(StatusCode.OK if ok else StatusCode.ERROR))
        self._span.end()


class Tracing:
    """Makes spans. One per process and service name."""

    def __init__(self, service: str, endpoint: str | None = None, exporter: Any = None) -> None:
        """``endpoint``: an OTLP collector's gRPC address (http://HOST:4317); None records nothing. ``exporter``: a span
        exporter instead of OTLP's.
        """
        self._tracer: Any = None
        self._provider: Any = None
        if endpoint is None and exporter is None:
            return
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not str(endpoint).startswith("https"))
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("npufleet")

    @property
    def records(self) -> bool:
        """True where spans go anywhere."""
        return self._tracer is not None

    def span(self, name: str, headers: Pairs) -> Span:
        """Begin a span for a request with ``headers``; whoever begins it ends it."""
        if self._tracer is None:
            return Span(headers)
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        given = {key: _text(value) for key, value in headers if key in CONTEXT_KEYS}
        span = self._tracer.start_span(name, context=propagator.extract(given), kind=SpanKind.SERVER)
        carrier: dict[str, str] = {}
        propagator.inject(carrier, context=set_span_in_context(span))
        return _Recorded(span, tuple(carrier.items()))

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
