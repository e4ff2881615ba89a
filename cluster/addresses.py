"""Hosts and ports as they are written in URLs and messages."""

from __future__ import annotations

WILDCARDS = ("0.0.0.0", "::")


def netloc(host: str, port: int) -> str:
    """Return ``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str, node_address: str = "127.0.0.1") -> str:
    """Return the address under which others reach what listens on ``host``: the node's own for a wildcard."""
    return node_address if host in WILDCARDS else host
