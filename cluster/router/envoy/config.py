"""Envoy's configuration, as pure functions from settings to plain data.

Generate and Embed pass a filter that asks our picker, then go to the engine it chose, which the ``override_host``
policy only accepts from the set of engines that the router wrote. Everything else goes to the router's own
front. Headers with which a client could choose, or pretend, are removed before any filter sees them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import grpc

from npufleet.cluster.router.envoy import filters
from npufleet.cluster.router.envoy.settings import (
    DESTINATION_KEY,
    PEER_KEY,
    PICK_KEY,
    RANK_KEY,
    TOKEN_KEY,
    EnvoySettings,
)
from npufleet.cluster.router.wire import SERVICE, path
from npufleet.cluster.tls import ServerTls

ENGINES = "engines"
FRONT = "front"
PICKER_HTTP = "picker-http"
PICKER_GRPC = "picker-grpc"
PICKED = ("Generate", "Embed")
FRONT_SERVICES = (SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
                  "grpc.reflection.v1.ServerReflection", "npufleet.Lookaside")  # fmt: skip

_TYPE = "type.googleapis.com/envoy"
_RETRY_ON = "connect-failure,refused-stream,unavailable,resource-exhausted"  # all before any output
_HEADERS_KB = 60
_NOBODY = "npufleet-nobody"


def typed(kind: str, **fields: Any) -> dict[str, Any]:
    """An Any of Envoy's message ``kind``, without the common prefix of their names."""
    return {"@type": f"{_TYPE}.{kind}", **fields}


def seconds(value: float) -> str:
    """A duration as Envoy's JSON has it."""
    return f"{value:.3f}s"


def bootstrap(settings: EnvoySettings) -> dict[str, Any]:
    """The whole configuration of one Envoy."""
    return {
        "node": {"id": "npufleet", "cluster": "npufleet"},
        "admin": {"address": _pipe(settings.admin)},
        "static_resources": {
            "listeners": [_listener(settings)],
            "clusters": [
                _engines(settings),
                _local(FRONT, str(settings.front), settings, http2=True),
                _local(PICKER_HTTP, str(settings.authz), settings, http2=False),
                _local(PICKER_GRPC, str(settings.picker), settings, http2=True),
            ],
        },
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": typed(
                        "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                        max_active_downstream_connections=settings.max_connections,
                    ),
                }
            ]
        },
        "layered_runtime": {
            "layers": [
                {
                    "name": "static",
                    "static_layer": {
                        # One engine that fails must not make Envoy send requests to any other one.
                        "upstream.healthy_panic_threshold": 0,
                    },
                }
            ]
        },
    }


def endpoints(addresses: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """The file of engines: ``addresses`` has IP and port by engine id."""
    hosts = [
        {
            "endpoint": {"address": _socket(host, port)},
            "metadata": {"filter_metadata": {"npufleet": {"engine": engine_id}}},
        }
        for engine_id, (host, port) in sorted(addresses.items())
    ]
    assignment = typed(
        "config.endpoint.v3.ClusterLoadAssignment", cluster_name=ENGINES, endpoints=[{"lb_endpoints": hosts}]
    )
    return {"resources": [assignment]}


def as_json(data: Mapping[str, Any]) -> str:
    """``data`` as text for a file."""
    return json.dumps(data, indent=1) + "\n"


def _pipe(where: Any) -> dict[str, Any]:
    return {"pipe": {"path": str(where)}}


def _socket(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _http2(**limits: Any) -> dict[str, Any]:
    return {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": typed(
            "extensions.upstreams.http.v3.HttpProtocolOptions",
            explicit_http_config={"http2_protocol_options": limits},
        )
    }


def _windows(settings: EnvoySettings) -> dict[str, Any]:
    return {
        "initial_stream_window_size": settings.stream_window,
        "initial_connection_window_size": settings.connection_window,
    }


def _local(name: str, where: str, settings: EnvoySettings, *, http2: bool) -> dict[str, Any]:
    """A cluster of one Unix socket of the router."""
    cluster: dict[str, Any] = {
        "name": name,
        "type": "STATIC",
        "connect_timeout": seconds(settings.connect_timeout),
        "circuit_breakers": _breakers(settings),
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _pipe(where)}}]}],
        },
    }
    if http2:
        cluster["typed_extension_protocol_options"] = _http2(**_windows(settings))
    return cluster


def _breakers(settings: EnvoySettings, **more: Any) -> dict[str, Any]:
    most = settings.router.max_streams
    limits = {name: most for name in ("max_connections", "max_pending_requests", "max_requests")}
    return {"thresholds": [{**limits, **more}]}


def _engines(settings: EnvoySettings) -> dict[str, Any]:
    router = settings.router
    budget = {"budget_percent": {"value": 20}, "min_retry_concurrency": router.retry_budget}
    # What is not chosen goes nowhere: any engine of the set might serve another model.
    nobody = typed(
        "extensions.load_balancing_policies.subset.v3.Subset",
        fallback_policy="DEFAULT_SUBSET",
        default_subset={_NOBODY: "nobody"},
        subset_selectors=[{"keys": [_NOBODY]}],
        subset_lb_policy=_policy(
            "round_robin", typed("extensions.load_balancing_policies.round_robin.v3.RoundRobin")
        ),
    )
    override = typed(
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": DESTINATION_KEY}],
        selected_host_key={"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]},
        fallback_policy=_policy("subset", nobody),
    )
    keepalive = {
        "interval": seconds(router.keepalive_time),
        "timeout": seconds(router.keepalive_timeout),
    }
    cluster: dict[str, Any] = {
        "name": ENGINES,
        "type": "EDS",
        "eds_cluster_config": {
            "eds_config": {
                "resource_api_version": "V3",
                "path_config_source": {
                    "path": str(settings.engines),
                    "watched_directory": {"path": str(settings.engines.parent)},
                },
            }
        },
        "connect_timeout": seconds(settings.connect_timeout),
        "circuit_breakers": _breakers(settings, max_retries=router.max_streams, retry_budget=budget),
        "load_balancing_policy": _policy("override_host", override),
        "typed_extension_protocol_options": _http2(**_windows(settings), connection_keepalive=keepalive),
    }
    if router.tls is not None:
        cluster["transport_socket"] = _tls(settings)
    return cluster


def _tls(settings: EnvoySettings) -> dict[str, Any]:
    tls = settings.router.tls
    assert tls is not None
    trust = str(tls.ca) if tls.ca is not None else "/etc/ssl/certs/ca-certificates.crt"
    common: dict[str, Any] = {
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "validation_context": {"trusted_ca": {"filename": trust}},
    }
    if tls.certificate is not None:
        common["tls_certificates"] = [
            {
                "certificate_chain": {"filename": str(tls.certificate)},
                "private_key": {"filename": str(tls.key)},
            }
        ]
    context = typed("extensions.transport_sockets.tls.v3.UpstreamTlsContext", common_tls_context=common)
    if tls.server_name is not None:
        context["sni"] = tls.server_name
        common["validation_context"]["match_typed_subject_alt_names"] = [
            {"san_type": "DNS", "matcher": {"exact": tls.server_name}}
        ]
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


def _own_tls(tls: ServerTls) -> dict[str, Any]:
    """What clients meet on the listener's port."""
    pair = {"certificate_chain": {"filename": tls.certificate}, "private_key": {"filename": tls.key}}
    common: dict[str, Any] = {
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "tls_certificates": [pair],
    }
    if tls.client_ca is not None:
        common["validation_context"] = {"trusted_ca": {"filename": tls.client_ca}}
    context = typed(
        "extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        common_tls_context=common,
        require_client_certificate=tls.client_ca is not None,
    )
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


def _policy(name: str, config: dict[str, Any]) -> dict[str, Any]:
    extension = {"name": f"envoy.load_balancing_policies.{name}", "typed_config": config}
    return {"policies": [{"typed_extension_config": extension}]}


def _listener(settings: EnvoySettings) -> dict[str, Any]:
    router = settings.router
    strip = [{"remove": key} for key in (DESTINATION_KEY, PICK_KEY, RANK_KEY, TOKEN_KEY, PEER_KEY)]
    peer = {"header": {"key": PEER_KEY, "value": "%DOWNSTREAM_REMOTE_ADDRESS%"},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}  # fmt: skip
    early = typed("extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                  mutations=[*strip, {"append": peer}])  # fmt: skip
    manager = typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="ingress",
        codec_type="HTTP2",
        use_remote_address=True,
        skip_xff_append=True,
        # Envoy resets a stream with more; what is above the engines' own limit shall get their status instead.
        max_request_headers_kb=max(_HEADERS_KB, router.max_metadata_bytes >> 10),
        stream_idle_timeout="0s",  # a long prompt is silent for as long as its deadline allows
        request_headers_timeout="10s",
        http2_protocol_options={
            "max_concurrent_streams": router.max_streams,
            "connection_keepalive": {"interval": "30s", "timeout": "10s"},
            **_windows(settings),
        },
        early_header_mutation_extensions=[{"name": "strip", "typed_config": early}],
        route_config=_routes(settings),
        http_filters=filters.chain(settings),
        access_log=filters.access_logs(settings),
        local_reply_config={"mappers": [_too_large(router.max_request_bytes)]},
    )
    chain: dict[str, Any] = {"filters": [{"name": "http", "typed_config": manager}]}
    if settings.tls is not None:
        chain["transport_socket"] = _own_tls(settings.tls)
    return {
        "name": "router",
        "address": _socket(settings.host, settings.port),
        "per_connection_buffer_limit_bytes": settings.connection_window,
        "filter_chains": [chain],
    }


def _too_large(most: int) -> dict[str, Any]:
    """Of a request that the filter will not hold: the status that the router's own front gives it."""
    status = {
        "header": {"key": "grpc-status", "value": str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    }
    is_413 = {"op": "EQ", "value": {"default_value": 413, "runtime_key": "npufleet.too_large"}}
    return {
        "filter": {"status_code_filter": {"comparison": is_413}},
        "headers_to_add": [status],
        "body": {"inline_string": f"the request is longer than {most} bytes"},
    }


def _routes(settings: EnvoySettings) -> dict[str, Any]:
    router = settings.router
    retry = {
        "retry_on": _RETRY_ON,
        "num_retries": router.max_attempts - 1,
        "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.025s"},
    }
    # A client's own deadline is kept by the client and by the engine: were it Envoy's too, its reset of the
    # stream would race the client's clock, and clients would see INTERNAL.
    theirs, ours = {"name": "grpc-timeout", "present_match": True}, seconds(router.request_timeout)
    picked = [
        {
            "match": {"path": path(method), **match},
            "route": {
                "cluster": ENGINES,
                "timeout": "0s",
                "max_stream_duration": {"max_stream_duration": longest},
                "retry_policy": retry,
            },
        }
        for method in PICKED
        for match, longest in (({"headers": [theirs]}, "0s"), ({}, ours))
    ]
    rest = [
        {
            "match": {"prefix": f"/{service}/"},
            "route": {
                "cluster": FRONT,
                "timeout": "0s",
                "max_stream_duration": {"grpc_timeout_header_max": "0s"},
            },
            "typed_per_filter_config": filters.unpicked(settings),
        }
        for service in FRONT_SERVICES
    ]
    return {
        "name": "router",
        "virtual_hosts": [{"name": "router", "domains": ["*"], "routes": [*picked, *rest]}],
    }
