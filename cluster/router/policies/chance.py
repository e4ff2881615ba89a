"""Numbers that look random and follow from a ticket, so that a decision can be replayed."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix(number: int) -> int:
    """64 well-mixed bits of ``number`` (SplitMix64, Steele et al., OOPSLA 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
