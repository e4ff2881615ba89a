"""Plans cost at most 5 % more than an exact solver's, where that is installed (`pip install -e .[benchmarks]`)."""

from __future__ import annotations

import pytest

pytest.importorskip("ortools", reason="the exact solver comes with the extra 'benchmarks'")

from benchmarks import placement, placement_cases
from benchmarks.placement_exact import Exact


@pytest.mark.parametrize("kinds", placement.KINDS, ids=" ".join)
def test_plans_are_close_to_the_optimum(kinds: tuple[str, ...]) -> None:
    ours = best = 0
    for seed in range(100, 104):
        case = placement_cases.small(seed, kinds)
        cost = placement_cases.total(case, placement.ours(case))
        lowest, proven = Exact(case=case).solve(10.0)
        assert not proven or lowest <= cost, "the solver's model is wrong: it knows a dearer optimum"
        ours, best = ours + cost, best + lowest
    assert ours <= 1.05 * best
