"""Prefix affinity by what the engines themselves say of their caches."""

from __future__ import annotations

from npufleet.cluster.router.base import PrefixView
from npufleet.cluster.router.policies.prefix_affinity import PrefixAffinity


class PrecisePrefix(PrefixAffinity):
    """Prefix affinity over the index of KV events (``prefix/index.py``)."""

    name = "precise-prefix"
    prefix = PrefixView.PRECISE
