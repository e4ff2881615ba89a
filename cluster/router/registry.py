"""Policies by name. A policy's module is imported when it is asked for, so an unused one costs nothing."""

from __future__ import annotations

import difflib
from importlib import import_module

from npufleet.cluster.router.base import Policy

DEFAULT_POLICY = "least-load"

_POLICIES = {
    "round-robin": ("npufleet.cluster.router.round_robin", "RoundRobin"),
    "least-load": ("npufleet.cluster.router.least_load", "LeastLoad"),
}


def known_policies() -> tuple[str, ...]:
    """The names :func:`load_policy` takes."""
    return tuple(sorted(_POLICIES))


def load_policy(name: str) -> Policy:
    """The policy called ``name``; underscores count as dashes. ValueError names the known ones."""
    key = name.replace("_", "-")
    if key not in _POLICIES:
        near = difflib.get_close_matches(key, _POLICIES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown routing policy {name!r}{hint}; known: {', '.join(known_policies())}")
    module, attribute = _POLICIES[key]
    policy = getattr(import_module(module), attribute)()
    assert isinstance(policy, Policy)
    return policy
