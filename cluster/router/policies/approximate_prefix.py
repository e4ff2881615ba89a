"""Prefix affinity by what this router sent where: for engines without KV events."""

from __future__ import annotations

from npufleet.cluster.router.base import PrefixView
from npufleet.cluster.router.policies.prefix_affinity import PrefixAffinity


class ApproximatePrefix(PrefixAffinity):
    """Prefix affinity over a guess of the engines' caches (``prefix/guess.py``)."""

    name = "approximate-prefix"
    prefix = PrefixView.APPROXIMATE
