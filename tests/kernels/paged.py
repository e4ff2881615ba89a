"""Paged attention cases: queries, caches and block tables together with the keys that they stand for."""

from dataclasses import dataclass

import torch

from . import formulas


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    """A batch on the CPU; ``keys`` and ``values`` are the unpaged ones of each request."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_lengths: list[int]
    kv_lens: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def query_ends(self) -> list[int]:
        return torch.tensor(self.query_lengths).cumsum(0).tolist()

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """query, key cache, value cache and block table on the device."""
        return tuple(x.to(device) for x in (self.query, self.key_cache, self.value_cache, self.block_table))

    def expected(self, scale: float, window: int | None = None) -> torch.Tensor:
        return formulas.attention(
            self.query, self.keys, self.values, self.query_lengths, scale, window=window
        )


def make_case(
    requests: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    heads: int = 6,
    key_heads: int = 2,
    head: int = 16,
    block: int = 16,
    seed: int = 3,
) -> PagedCase:
    """``requests``: (queries, keys) each. Pages are shuffled; unused entries and page ends hold rubbish."""
    random = torch.Generator().manual_seed(seed)
    needed = [-(-keys // block) for _, keys in requests]
    blocks = sum(needed) + 3
    pages = torch.randperm(blocks, generator=random).tolist()
    caches = torch.full((2, blocks, block, key_heads, head), 1e4).to(dtype)
    table = torch.randint(
        0, blocks, (len(requests), max(needed, default=0) + 2), generator=random, dtype=torch.int32
    )
    keys, values = [], []
    for request, (_, length) in enumerate(requests):
        mine = [pages.pop() for _ in range(needed[request])]
        table[request, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        new = torch.randn(2, length, key_heads, head, generator=random).to(dtype)
        for place in range(length):
            caches[:, mine[place // block], place % block] = new[:, place]
        keys.append(new[0])
        values.append(new[1])
    tokens = sum(queries for queries, _ in requests)
    return PagedCase(
        query=torch.randn(tokens, heads, head, generator=random).to(dtype),
        key_cache=caches[0].contiguous(),
        value_cache=caches[1].contiguous(),
        block_table=table,
        query_lengths=[queries for queries, _ in requests],
        kv_lens=[length for _, length in requests],
        keys=keys,
        values=values,
    )
