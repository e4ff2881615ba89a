"""The blocks of a simulated KV cache, as vLLM's ``BlockPool`` keeps them.

A block that nobody uses stays cached until its place is needed; the longest unused goes first, and of one
request's blocks the last before the first. A block without a whole block's content is reused before any other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from npufleet.cluster.router.prefix.prompt import Key


class Block:
    """One physical block."""

    __slots__ = ("full", "key", "users")

    def __init__(self) -> None:
        self.key: Key | None = None  # what is cached in it, if it can be found again
        self.full = False
        self.users = 0


class BlockPool:
    """``size`` blocks. Removed keys gather in ``removed`` until the owner takes them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.removed: list[Key] = []
        self._cached: dict[Key, Block] = {}
        self._free: OrderedDict[Block, None] = OrderedDict((Block(), None) for _ in range(size))

    @property
    def free(self) -> int:
        """Blocks that nobody uses, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use."""
        return 1.0 - len(self._free) / self.size

    def prefix(self, keys: Sequence[Key], most: int) -> list[Block]:
        """The cached blocks of the longest prefix of ``keys``, ``most`` at most."""
        found: list[Block] = []
        for key in keys[:most]:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def use(self, blocks: Iterable[Block]) -> None:
        """One more user for each of ``blocks``."""
        for block in blocks:
            if not block.users:
                del self._free[block]
            block.users += 1

    def take(self, count: int) -> list[Block]:
        """``count`` blocks with nothing in them; there must be as many free."""
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if block.key is not None:
                del self._cached[block.key]
                self.removed.append(block.key)
                block.key = None
            block.full = False
            block.users = 1
            taken.append(block)
        return taken

    def cache(self, block: Block, key: Key) -> bool:
        """``block`` is whole now; True where ``key`` can be found in it from now on.

        Another block may hold the same content already; then this one is not to be found.
        """
        block.full = True
        if key in self._cached:
            return False
        block.key = key
        self._cached[key] = block
        return True

    def release(self, blocks: Sequence[Block]) -> None:
        """One user less for each block of a request, given first to last."""
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                self._free[block] = None
                if not block.full:
                    self._free.move_to_end(block, last=False)
