"""How tokens and experts of different ranks meet."""

from .base import Communication
from .by_size import BySize

__all__ = ["BySize", "Communication"]
