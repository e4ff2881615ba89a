"""What the fused dispatch and combine of experts (MC2) take: sizes, and tokens that fit a communicator's buffer.

From torch_npu's documentation of ``npu_moe_distribute_dispatch_v2`` and ``npu_moe_distribute_combine_v2``
(``op-plugin``, custom APIs, with the expert count per NPU on A2 from CANN's of ``aclnnMoeDistributeDispatchV4``).
Pure arithmetic: nothing here needs a device.
"""

from dataclasses import dataclass

MIB = 1 << 20
MAX_EXPERTS, MAX_TOP_K = 1024, 16
FULL_MESH, HIERARCHY = "fullmesh", "hierarchy"
ALGORITHMS = {"A2": (FULL_MESH, HIERARCHY), "A3": ("", "fullmesh_v1", "fullmesh_v2", HIERARCHY)}
"""Generation → what ``comm_alg`` may be. On A2 the empty one means what two environment variables say."""
_A2_MESH_RANKS = (*range(2, 9), 16, 32, 64, 128, 256)
_A2_NODES = (16, 32, 64)


def generation(chip: str) -> str | None:
    """``A2`` or ``A3`` for a chip's name, None for chips that the operators are not documented for."""
    for start, name in (("Ascend910B", "A2"), ("Ascend910_93", "A3")):
        if chip.startswith(start):
            return name
    return None


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """What all calls for a layer have in common."""

    generation: str
    algorithm: str
    ranks: int
    experts: int
    """Routed experts on all ranks."""
    top_k: int
    hidden: int
    itemsize: int = 2
    shared: int = 1
    shared_ranks: int = 0
    """Ranks that hold a shared expert and no routed one; they come first."""

    @property
    def local_experts(self) -> int:
        """Routed experts of a rank that holds some."""
        return self.experts // (self.ranks - self.shared_ranks)

    @property
    def weights_travel(self) -> bool:
        """Whether the weights of a token's experts travel with its rows."""
        return self.generation == "A2" or self.algorithm == HIERARCHY

    def rows(self, tokens: int) -> int:
        """Rows that a rank may receive when every rank has ``tokens`` tokens: A in the documentation."""
        return tokens * self.ranks * min(self.local_experts, self.top_k)

    def refusals(self) -> list[str]:
        """Why the operators do not take this layer; nothing if they do."""
        a2, hierarchy = self.generation == "A2", self.algorithm == HIERARCHY
        routed_ranks = self.ranks - self.shared_ranks
        shared = f"{self.shared} shared experts on {self.shared_ranks} ranks"
        found = [
            (self.algorithm not in ALGORITHMS[self.generation], f"comm_alg {self.algorithm!r}"),
            (not self._takes_ranks(), f"{self.ranks} ranks"),
            (not 1 <= self.experts <= (512 if hierarchy and not a2 else MAX_EXPERTS), f"{self.experts} experts"),
            (self.experts % max(routed_ranks, 1) > 0, f"{self.experts} experts on {routed_ranks} ranks"),
            (not self._takes_hidden(), f"hidden size {self.hidden}"),
            (not self._takes_top_k(), f"{self.top_k} experts per token"),
            (not self._takes_shared() or routed_ranks < 1, shared),
        ]  # fmt: skip
        if routed_ranks >= 1:
            local = self.local_experts
            found += [
                (a2 and not hierarchy and local > 24, f"{local} experts on a rank (at most 24)"),
                (not a2 and local * self.ranks > 2048, f"{local} experts on each of {self.ranks} ranks"),
            ]
        return [reason for wrong, reason in found if wrong]

    def _takes_ranks(self) -> bool:
        if self.generation == "A2":
            return self.ranks in (_A2_NODES if self.algorithm == HIERARCHY else _A2_MESH_RANKS)
        if self.algorithm == HIERARCHY:
            return 16 <= self.ranks <= 256 and self.ranks % 16 == 0
        return 2 <= self.ranks <= 768

    def _takes_hidden(self) -> bool:
        if self.generation == "A2":
            most = 10240 if self.algorithm == HIERARCHY else 7168
            return 0 < self.hidden <= most and self.hidden % 32 == 0
        return 1024 <= self.hidden <= 8192

    def _takes_top_k(self) -> bool:
        return 0 < self.top_k <= min(12 if self.algorithm == "fullmesh_v2" else MAX_TOP_K, self.experts)

    def _takes_shared(self) -> bool:
        if self.shared_ranks == 0:
            return self.shared in (0, 1)
        mesh = self.generation == "A3" and self.algorithm != HIERARCHY
        return mesh and 1 <= self.shared <= 4 and self.shared_ranks % self.shared == 0

    def token_limit(self) -> int:
        """Tokens of a rank that one call takes, whatever the buffer."""
        larger = (self.generation == "A2") == (self.algorithm == HIERARCHY)
        return 512 if larger and self.algorithm != "fullmesh_v2" else 256

    def buffer_bytes(self, tokens: int) -> int:
        """What the communicator's buffer (HCCL_BUFFSIZE) must hold for ``tokens`` tokens of the largest rank."""
        token = self.hidden * self.itemsize + 4 * _align(self.top_k, 8) * 4
        if self.algorithm == HIERARCHY and self.generation == "A2":
            return (self.experts + self.ranks // 4) * _align(tokens * token, 512) + 8 * MIB
        if self.algorithm == HIERARCHY:
            return self.experts * tokens * token + 404 * MIB
        row = 2 * self.hidden
        if self.generation == "A2":
            return 2 * (self.rows(tokens) * row + 2 * MIB)
        there = _align(row, 32) + 64
        there = -(-there // 480) * 512 if self.algorithm == "fullmesh_v2" else _align(there, 512)
        back = (self.top_k + self.shared) * tokens * _align(row, 512)
        return 2 * (self.local_experts * tokens * self.ranks * there + back)

    def most_tokens(self, buffer_bytes: int) -> int:
        """The most tokens of a rank that fit a buffer of ``buffer_bytes`` and one call."""
        fits = [n for n in range(1, self.token_limit() + 1) if self.buffer_bytes(n) <= buffer_bytes]
        return max(fits, default=0)
