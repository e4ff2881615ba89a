"""Envoy's configuration, as plain data (Envoy API v3).

One listener. Generate and Embed go through ``ext_authz`` to our picker, which answers with the model's cluster and the
engine's address in headers that a client cannot set, because the answer overwrites them and without an answer the
call ends with UNAVAILABLE. The cluster takes that address only if it is one of its own (``override_host``). All other
calls go to the router's own gRPC server. Clusters and their engines come from files that are replaced as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npufleet.cluster.router.wire import SERVICE
from npufleet.cluster.tls import ServerTls
from npufleet.cluster.transport.base import LinkSettings, Tls

DESTINATION = "x-npufleet-destination"
CLUSTER = "x-npufleet-cluster"
LEASE = "x-npufleet-lease"
LOG_MARK = "npufleet-call"

_TYPE = "type.googleapis.com/"
_ASK_HEADERS = ("x-npufleet-model", "x-npufleet-session", "x-npufleet-ext-bin", "x-api-key", "grpc-encoding")
_MANY = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What Envoy is to do."""

    host: str
    port: int
    picker_port: int  # ext_authz over HTTP, on loopback
    router_port: int  # the router's gRPC server, on loopback
    directory: Path  # of clusters.json and the engines' files
    max_request_bytes: int
    ask_timeout: float  # seconds that the picker may take: it may let a request wait
    call_timeout: float  # seconds of a call without a deadline
    link: LinkSettings
    tls: ServerTls | None = None
    engine_tls: Tls | None = None


def bootstrap(plan: Plan) -> dict[str, Any]:
    """The file that Envoy starts with."""
    clusters = {"path_config_source": _watched(plan, clusters_file(plan.directory))}
    return {
        "node": {"id": "npufleet", "cluster": "npufleet"},
        "dynamic_resources": {"cds_config": {**clusters, "resource_api_version": "V3"}},
        "static_resources": {
            "listeners": [_listener(plan)],
            "clusters": [
                _static_cluster("picker", plan.picker_port, http2=False),
                _static_cluster("router", plan.router_port, http2=True),
            ],
        },
    }


def clusters(plan: Plan, models: Sequence[str]) -> dict[str, Any]:
    """The content of :func:`clusters_file`: one cluster per model deployment."""
    return {"resources": [_model_cluster(plan, model) for model in models]}


def engines(model: str, addresses: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """The content of :func:`engines_file`: IP addresses and ports of the engines of ``model``."""
    endpoints = [{"endpoint": {"address": _address(host, port)}} for host, port in addresses]
    resource = {
        "@type": f"{_TYPE}envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": cluster_of(model),
        "endpoints": [{"lb_endpoints": endpoints}],
        "policy": {"overprovisioning_factor": 100},
    }
    return {"resources": [resource]}


def cluster_of(model: str) -> str:
    """The cluster of a model deployment; a hash, because a name may have any letters."""
    return f"model-{hashlib.sha256(model.encode()).hexdigest()[:16]}"


def clusters_file(directory: Path) -> Path:
    """Where the clusters are described."""
    return directory / "clusters.json"


def engines_file(directory: Path, model: str) -> Path:
    """Where the engines of ``model`` are described."""
    return directory / f"{cluster_of(model)}.json"


def _seconds(value: float) -> str:
    return f"{value:.3f}s"


def _watched(plan: Plan, file: Path) -> dict[str, Any]:
    return {"path": str(file), "watched_directory": {"path": str(plan.directory)}}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _exact(names: Sequence[str]) -> dict[str, Any]:
    return {"patterns": [{"exact": name} for name in names]}


def _listener(plan: Plan) -> dict[str, Any]:
    manager = {
        "@type": f"{_TYPE}envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "codec_type": "HTTP2",
        "stream_idle_timeout": "0s",
        "normalize_path": True,
        "max_request_headers_kb": 60,
        "http2_protocol_options": {
            "max_concurrent_streams": 8192,
            "initial_stream_window_size": 1 << 20,
            "initial_connection_window_size": 16 << 20,
        },
        "access_log": [_access_log()],
        "http_filters": [_ask_picker(plan), _terminal()],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": _routes(plan)}]},
    }
    chain: dict[str, Any] = {
        "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    }
    if plan.tls is not None:
        chain["transport_socket"] = _own_tls(plan.tls)
    return {
        "name": "front",
        "address": _address(plan.host, plan.port),
        "per_connection_buffer_limit_bytes": max(1 << 20, plan.max_request_bytes),
        "filter_chains": [chain],
    }


def _access_log() -> dict[str, Any]:
    """A line per picked call on Envoy's standard output, which is how the router learns of its end."""
    line = f"{LOG_MARK} %REQ({LEASE})% %GRPC_STATUS_NUMBER% %RESPONSE_CODE%\n"
    return {
        "name": "envoy.access_loggers.stdout",
        "filter": {"header_filter": {"header": {"name": LEASE, "present_match": True}}},
        "typed_config": {
            "@type": f"{_TYPE}envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
            "log_format": {"text_format_source": {"inline_string": line}},
        },
    }


def _ask_picker(plan: Plan) -> dict[str, Any]:
    return {
        "name": "envoy.filters.http.ext_authz",
        "typed_config": {
            "@type": f"{_TYPE}envoy.extensions.filters.http.ext_authz.v3.ExtAuthz",
            "failure_mode_allow": False,
            "status_on_error": {"code": "ServiceUnavailable"},
            "clear_route_cache": True,  # the answer names the cluster
            "with_request_body": {"max_request_bytes": plan.max_request_bytes, "pack_as_bytes": True},
            "allowed_headers": _exact(_ASK_HEADERS),
            "http_service": {
                "server_uri": {
                    "uri": "http://picker",
                    "cluster": "picker",
                    "timeout": _seconds(plan.ask_timeout),
                },
                "authorization_response": {
                    "allowed_upstream_headers": _exact([DESTINATION, CLUSTER, LEASE]),
                    "allowed_client_headers": _exact(
                        ["grpc-status", "retry-after", "grpc-retry-pushback-ms"]
                    ),
                },
            },
        },
    }


def _terminal() -> dict[str, Any]:
    kind = f"{_TYPE}envoy.extensions.filters.http.router.v3.Router"
    return {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": kind, "suppress_envoy_headers": True},
    }


def _routes(plan: Plan) -> list[dict[str, Any]]:
    limits = {
        "timeout": "0s",
        "max_stream_duration": {
            "max_stream_duration": _seconds(plan.call_timeout),
            "grpc_timeout_header_max": "0s",  # a client's own deadline, whatever it is
        },
    }
    retry = {  # only where the engine has not seen the request
        "retry_on": "connect-failure,refused-stream",
        "num_retries": 2,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": f"{_TYPE}envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                },
            }
        ],
    }
    picked = [
        {
            "match": {"path": f"/{SERVICE}/{method}"},
            "route": {"cluster_header": CLUSTER, "retry_policy": retry, **limits},
            "request_headers_to_remove": [
                "authorization",
                "x-api-key",
                CLUSTER,
            ],  # the destination is read later
        }
        for method in ("Generate", "Embed")
    ]
    unasked = {
        "@type": f"{_TYPE}envoy.extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute",
        "disabled": True,
    }
    rest = {
        "match": {"prefix": "/"},
        "route": {"cluster": "router", **limits},
        "typed_per_filter_config": {"envoy.filters.http.ext_authz": unasked},
        "request_headers_to_remove": [LEASE],
    }
    return [*picked, rest]


def _http2(link: LinkSettings | None) -> dict[str, Any]:
    options: dict[str, Any] = {"max_concurrent_streams": _MANY}
    if link is not None:
        options["connection_keepalive"] = {
            "interval": _seconds(link.keepalive_time),
            "timeout": _seconds(link.keepalive_timeout),
        }
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    explicit = {"@type": f"{_TYPE}{name}", "explicit_http_config": {"http2_protocol_options": options}}
    return {name: explicit}


def _limits() -> dict[str, Any]:
    """None of Envoy's own: admission is the router's."""
    names = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"thresholds": [dict.fromkeys(names, _MANY)]}


def _static_cluster(name: str, port: int, *, http2: bool) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _address("127.0.0.1", port)}}
    made: dict[str, Any] = {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "circuit_breakers": _limits(),
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    if http2:
        made["typed_extension_protocol_options"] = _http2(None)
    return made


def _model_cluster(plan: Plan, model: str) -> dict[str, Any]:
    name = cluster_of(model)
    fallback = f"{_TYPE}envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest"
    override = {
        "@type": f"{_TYPE}envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": DESTINATION}],
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.least_request",
                        "typed_config": {"@type": fallback},
                    }
                }
            ]
        },
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    file = {"path_config_source": _watched(plan, engines_file(plan.directory, model))}
    made: dict[str, Any] = {
        "@type": f"{_TYPE}envoy.config.cluster.v3.Cluster",
        "name": name,
        "type": "EDS",
        "connect_timeout": _seconds(plan.link.connect_timeout),
        "eds_cluster_config": {"eds_config": {**file, "resource_api_version": "V3"}},
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "circuit_breakers": _limits(),
        "ignore_health_on_host_removal": True,
        "typed_extension_protocol_options": _http2(plan.link),
    }
    if plan.engine_tls is not None:
        made["transport_socket"] = _engine_tls(plan.engine_tls)
    return made


def _file(path: object) -> dict[str, str]:
    return {"filename": str(path)}


def _pair(certificate: object, key: object) -> list[dict[str, Any]]:
    return [{"certificate_chain": _file(certificate), "private_key": _file(key)}]


def _own_tls(tls: ServerTls) -> dict[str, Any]:
    common: dict[str, Any] = {
        "alpn_protocols": ["h2"],
        "tls_certificates": _pair(tls.certificate, tls.key),
    }
    if tls.client_ca is not None:
        common["validation_context"] = {"trusted_ca": _file(tls.client_ca)}
    context = {
        "@type": f"{_TYPE}envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": common,
        "require_client_certificate": tls.client_ca is not None,
    }
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


def _engine_tls(tls: Tls) -> dict[str, Any]:
    common: dict[str, Any] = {"alpn_protocols": ["h2"]}
    if tls.ca is not None:
        common["validation_context"] = {"trusted_ca": _file(tls.ca)}
    if tls.certificate is not None:
        common["tls_certificates"] = _pair(tls.certificate, tls.key)
    context: dict[str, Any] = {
        "@type": f"{_TYPE}envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": common,
    }
    if tls.server_name is not None:
        context["sni"] = tls.server_name
        names = [{"san_type": "DNS", "matcher": {"exact": tls.server_name}}]
        common.setdefault("validation_context", {})["match_typed_subject_alt_names"] = names
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}
