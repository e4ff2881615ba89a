"""Policies by name. A policy's module is imported when it is asked for, so an unused one costs nothing."""

from __future__ import annotations

import difflib
from importlib import import_module

from npufleet.cluster.router.base import Policy

DEFAULT_POLICY = "predicted-ttft"

_FOLDER = "npufleet.cluster.router.policies"
_POLICIES = {
    "round-robin": ("round_robin", "RoundRobin"),
    "random": ("random_pick", "RandomPick"),
    "power-of-two": ("power_of_two", "PowerOfTwo"),
    "least-load": ("least_load", "LeastLoad"),
    "sticky-session": ("sticky_session", "StickySession"),
    "consistent-hash": ("consistent_hash", "ConsistentHash"),
    "approximate-prefix": ("approximate_prefix", "ApproximatePrefix"),
    "precise-prefix": ("precise_prefix", "PrecisePrefix"),
    "predicted-ttft": ("predicted_ttft", "PredictedTtft"),
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
    policy = getattr(import_module(f"{_FOLDER}.{module}"), attribute)()
    assert isinstance(policy, Policy)
    return policy
