"""The filters that a Generate or Embed passes in Envoy, and what Envoy tells when it has ended."""

from __future__ import annotations

from typing import Any

from npufleet.cluster.router.envoy.settings import (
    DESTINATION_KEY,
    FRAME,
    PEER_KEY,
    PICK_KEY,
    RANK_KEY,
    RETRIES_KEY,
    TOKEN_KEY,
    EnvoySettings,
    Filter,
)

_TYPE = "type.googleapis.com/envoy.extensions"
_AUTHZ = "envoy.filters.http.ext_authz"
_PROC = "envoy.filters.http.ext_proc"
_LUA = "envoy.filters.http.lua"
_ASKED = ("grpc-timeout", "grpc-encoding", "authorization", "x-api-key")
_CHOSEN = (DESTINATION_KEY, PICK_KEY, RANK_KEY, RETRIES_KEY, TOKEN_KEY)

# The first answer of an engine ends the wait for a prompt: the picker's loads and paces need that moment.
# The message is not waited for, and a failure says nothing about the request.
_STARTED = f"""
function envoy_on_request(handle)
  local pick = handle:headers():get("{PICK_KEY}")
  if pick ~= nil then
    handle:streamInfo():dynamicMetadata():set("npufleet", "pick", pick)
  end
end
function envoy_on_response(handle)
  local own = handle:streamInfo():dynamicMetadata():get("npufleet")
  if own == nil or own["pick"] == nil or handle:headers():get("grpc-status") ~= nil then
    return
  end
  local ask = {{[":method"] = "POST", [":path"] = "/started/" .. own["pick"], [":authority"] = "picker"}}
  handle:httpCall("picker-http", ask, "", 1000, true)
end
"""


def chain(settings: EnvoySettings) -> list[dict[str, Any]]:
    """The HTTP filters, in the order in which a request meets them."""
    if settings.filter is Filter.EXT_PROC:
        ask = [_named(_PROC, _proc(settings))]
    else:
        lua = {
            "@type": f"{_TYPE}.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": _STARTED},
        }
        ask = [_named(_AUTHZ, _authz(settings)), _named(_LUA, lua)]
    return [
        *ask,
        _named("envoy.filters.http.header_mutation", _who()),
        _named(
            "envoy.filters.http.router",
            {"@type": f"{_TYPE}.filters.http.router.v3.Router", "suppress_envoy_headers": True},
        ),
    ]


def unpicked(settings: EnvoySettings) -> dict[str, Any]:
    """Per-route configuration of what needs no engine chosen."""
    if settings.filter is Filter.EXT_PROC:
        off = {"@type": f"{_TYPE}.filters.http.ext_proc.v3.ExtProcPerRoute", "disabled": True}
        return {_PROC: off}
    off = {"@type": f"{_TYPE}.filters.http.ext_authz.v3.ExtAuthzPerRoute", "disabled": True}
    return {_AUTHZ: off}


def access_logs(settings: EnvoySettings) -> list[dict[str, Any]]:
    """Tell the picker how each picked request ended, some of them at once. The Endpoint Picker sees that itself."""
    if settings.filter is Filter.EXT_PROC:
        return []
    log = {
        "name": "envoy.access_loggers.http_grpc",
        "filter": {
            "header_filter": {"header": {"name": PICK_KEY, "present_match": True}},
        },
        "typed_config": {
            "@type": f"{_TYPE}.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
            "common_config": {
                "log_name": "picks",
                "transport_api_version": "V3",
                "buffer_flush_interval": "0.05s",
                "grpc_service": {"envoy_grpc": {"cluster_name": "picker-grpc"}},
            },
            "additional_request_headers_to_log": [PICK_KEY],
            "additional_response_headers_to_log": ["grpc-status"],
            "additional_response_trailers_to_log": ["grpc-status"],
        },
    }
    return [log]


def _named(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "typed_config": config}


def _exact(*names: str) -> dict[str, Any]:
    return {"patterns": [{"exact": name, "ignore_case": True} for name in names]}


def _authz(settings: EnvoySettings) -> dict[str, Any]:
    """Ask over HTTP/1.1 with all of the request; an answer other than 200 is the client's answer."""
    most = settings.router.max_request_bytes + FRAME
    return {
        "@type": f"{_TYPE}.filters.http.ext_authz.v3.ExtAuthz",
        "transport_api_version": "V3",
        "failure_mode_allow": False,
        "status_on_error": {"code": "ServiceUnavailable"},
        "validate_mutations": True,
        "with_request_body": {"max_request_bytes": most, "allow_partial_message": False},
        "allowed_headers": {"patterns": [{"prefix": "x-npufleet-"}, *_exact(*_ASKED)["patterns"]]},
        "http_service": {
            "server_uri": {
                "uri": "http://picker",
                "cluster": "picker-http",
                "timeout": f"{settings.patience:.3f}s",
            },
            "authorization_response": {
                "allowed_upstream_headers": _exact(*_CHOSEN, "grpc-timeout"),
                "allowed_client_headers": _exact(
                    "grpc-status", "grpc-message", "retry-after", "grpc-retry-pushback-ms"
                ),
            },
        },
    }


def _proc(settings: EnvoySettings) -> dict[str, Any]:
    """The Endpoint Picker Protocol; response headers and trailers tell the picker how the request goes."""
    return {
        "@type": f"{_TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker-grpc"}, "timeout": "0s"},
        "failure_mode_allow": False,
        "message_timeout": f"{settings.patience:.3f}s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SEND",
        },
        "mutation_rules": {"allow_envoy": True},
        "metadata_options": {"forwarding_namespaces": {"untyped": ["envoy.lb"]}},
    }


def _who() -> dict[str, Any]:
    """Tell the client in the trailers which engine answered, and keep what is ours from the engine."""
    engine = {
        "header": {"key": "x-npufleet-engine", "value": "%UPSTREAM_METADATA(npufleet:engine)%"},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    }
    return {
        "@type": f"{_TYPE}.filters.http.header_mutation.v3.HeaderMutation",
        "mutations": {
            "request_mutations": [{"remove": key} for key in (PEER_KEY, "authorization", "x-api-key")],
            "response_trailers_mutations": [{"append": engine}],
        },
    }
