"""The contract of a source of facts about one node."""

from __future__ import annotations

from typing import Protocol

from ..facts import Facts


class Source(Protocol):
    """Looks at one place. It owns no state, so looking twice is harmless."""

    def look(self) -> Facts:
        """Return what this place says; fields that it does not know are None.

        Raises:
            ValueError: if the place is there and says something that makes no sense; the message names it.
        """
        ...
