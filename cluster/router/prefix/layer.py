"""One KV-cache group of a model: which engines hold which block.

A model with full attention only has one group. A hybrid one has several: full attention needs every block
of a prefix, sliding-window attention only those that the window still sees from the prefix's end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from npufleet.cluster.router.prefix.prompt import Key


class Layer:
    """Masks of engines by block key, bounded: beyond ``limit`` the least recently stored or used key goes."""

    def __init__(self, *, block_size: int, window: int, limit: int) -> None:
        """``block_size``: tokens; ``window``: tokens that attention sees, 0 = all; ``limit``: keys."""
        assert block_size > 0 and limit > 0
        self.block_size = block_size
        self.window = window
        self.users = 0  # engines that ever stored blocks here
        self._limit = limit
        self._masks: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, key: Key, bit: int) -> None:
        """The engine of ``bit`` holds ``key``."""
        masks = self._masks
        masks[key] = masks.get(key, 0) | bit
        if len(masks) > self._limit:
            masks.popitem(last=False)

    def remove(self, key: Key, bit: int) -> None:
        """It no longer does."""
        mask = self._masks.get(key)
        if mask is None:
            return
        mask &= ~bit
        if mask:
            self._masks[key] = mask
        else:
            del self._masks[key]

    def depths(self, keys: Sequence[Key], expected: Mapping[Key, int]) -> list[tuple[int, int]]:
        """``(engines, blocks)``: these engines hold that many leading blocks of ``keys`` without a hole.

        ``expected`` are masks beside the layer's own: blocks that are about to be there.
        """
        masks, found = self._masks, []
        alive, depth = -1, 0
        for depth, key in enumerate(keys):
            mask = masks.get(key, 0)
            if expected:
                mask |= expected.get(key, 0)
            still = alive & mask
            if still != alive:
                if depth:
                    found.append((alive & ~still, depth))
                alive = still
                if not alive:
                    break
        else:
            if keys:
                found.append((alive, len(keys)))
        if len(masks) * 4 > self._limit * 3:
            self._touch(keys[: depth + 1])
        return found

    def reach(self, keys: Sequence[Key], most: int, bit: int) -> int:
        """The longest prefix of at most ``most`` tokens that the engine of ``bit`` can go on from: it holds
        all blocks that the window sees from the prefix's end. Tokens.
        """
        need = -(-(self.window - 1) // self.block_size)
        end = min(most // self.block_size, len(keys))
        while end:
            run = 0
            while run < min(need, end) and self._masks.get(keys[end - 1 - run], 0) & bit:
                run += 1
            if run >= min(need, end):
                return end * self.block_size
            end -= run + 1
        return 0

    def _touch(self, keys: Sequence[Key]) -> None:
        """Keep what is used; a parent stays longer than its children, which mean nothing without it."""
        for key in reversed(keys):
            if key in self._masks:
                self._masks.move_to_end(key)
