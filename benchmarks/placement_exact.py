"""The cheapest placement of a small fleet by an exact solver (OR-tools CP-SAT): what the planner is measured by.

The model counts groups by domain; positions inside a domain are interchangeable, and die pairs are counted as
whole, half and broken ones. It states the rules and the aim of ``cluster/placement`` anew, from their definitions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ortools.sat.python import cp_model

from benchmarks.placement_cases import UNPLACED, Case
from npufleet.cluster.placement import cost
from npufleet.cluster.placement.plan import Request
from npufleet.cluster.topology.model import Node


@dataclass(kw_only=True)
class Exact:
    """One case as a constraint model."""

    case: Case
    model: Any = field(default_factory=cp_model.CpModel)
    bill: list[Any] = field(default_factory=list)  # terms of the cost
    placed: dict[str, Any] = field(default_factory=dict)
    on: dict[tuple[str, str], Any] = field(default_factory=dict)  # (engine, node): whether it uses it
    ranks: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))  # groups by engine

    def solve(self, seconds: float) -> tuple[int, bool]:
        """Return the lowest cost found, and whether it is proven to be the lowest."""
        free = self.case.free
        for wish in self.case.wishes:
            self.placed[wish.engine_id] = self.model.new_bool_var(f"placed {wish.engine_id}")
            self.bill.append(UNPLACED * wish.npus * (1 - self.placed[wish.engine_id]))
            for node in self.case.topology.nodes:
                self.on[wish.engine_id, node.node_id] = self.model.new_bool_var("on")
        for node in self.case.topology.nodes:
            if node.shape.packages:
                self._paired(node, free[node.node_id])
            else:
                self._plain(node, free[node.node_id])
        for wish in self.case.wishes:
            self._engine(wish)
        self._crowded()
        self._apart()
        self.model.minimize(sum(self.bill))
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 1
        status = solver.solve(self.model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
        return round(solver.objective_value), status == cp_model.OPTIMAL

    def _count(self, wish: Request, node: Node, most: int, step: int = 1) -> Any:
        """Groups of an engine on a node, in steps."""
        groups = self.model.new_int_var(0, most, "groups")
        on = self.on[wish.engine_id, node.node_id]
        self.model.add(groups <= most * on)
        self.ranks[wish.engine_id].append(groups * step)
        self.ranks[f"{wish.engine_id} {node.node_id}"].append(groups)
        return groups

    def _open(self, used: Any, most: int, before: bool) -> None:
        """The price of a domain in use."""
        if before:
            self.bill.append(cost.OPENED)
        elif most:
            opened = self.model.new_bool_var("opened")
            self.model.add(used <= most * opened)
            self.bill.append(cost.OPENED * opened)

    def _plain(self, node: Node, free: int) -> None:
        rings = node.shape.rings
        both = ((free & 0xFF) & (free >> 8)).bit_count() if rings else 0
        wide_used = []
        for wish in self.case.wishes if rings else []:
            size = wish.tensor_parallel_size
            if size > 8 and size % 2 == 0 and size <= 16:
                wide_used.append(size // 2 * self._count(wish, node, both // (size // 2)))
        if wide_used:
            self.model.add(sum(wide_used) <= both)
        for domain in node.shape.domains:
            room = (free & domain).bit_count()
            used = list(wide_used)
            for wish in self.case.wishes:
                if most := room // wish.tensor_parallel_size:
                    used.append(wish.tensor_parallel_size * self._count(wish, node, most))
            self.model.add(sum(used) <= room)
            self._open(sum(used), room, free & domain != domain & node.usable)

    def _paired(self, node: Node, free: int) -> None:
        pairs = [free & pair for pair in node.shape.packages]
        whole = sum(pair.bit_count() == 2 for pair in pairs)
        halves = sum(pair.bit_count() == 1 for pair in pairs)
        taken, singles = [], []
        for wish in self.case.wishes:
            size = wish.tensor_parallel_size
            if wish.npus == 1:
                singles.append(self._count(wish, node, 1))
            elif size == 1 and wish.groups % 2 == 0:
                taken.append(self._count(wish, node, whole, step=2))
            elif size % 2 == 0 and (most := whole // (size // 2)):
                taken.append(size // 2 * self._count(wish, node, most))
        in_halves = self.model.new_int_var(0, halves, "in halves")
        fresh = self.model.new_int_var(0, whole, "broken")
        in_fresh = self.model.new_int_var(0, 2 * whole, "in broken")
        self.model.add(sum(singles) == in_halves + in_fresh)
        self.model.add(in_fresh <= 2 * fresh)
        self.model.add(sum(taken) + fresh <= whole)
        self.bill.append(cost.HALVED * (halves - in_halves + 2 * fresh - in_fresh))
        used = 2 * sum(taken) + in_halves + in_fresh
        self._open(used, 2 * whole + halves, free != node.usable)

    def _engine(self, wish: Request) -> None:
        """All groups or none; one chip; one fabric for experts; the price of each further node."""
        name = wish.engine_id
        self.model.add(sum(self.ranks[name]) == wish.groups * self.placed[name])
        for node in self.case.topology.nodes:  # no node counts that holds nothing
            self.model.add(sum(self.ranks[f"{name} {node.node_id}"]) >= self.on[name, node.node_id])
        areas: dict[str, list[str]] = defaultdict(list)
        for node in self.case.topology.nodes:
            areas[f"{node.soc} {node.fabric}" if wish.expert_parallel else node.soc].append(node.node_id)
        chosen = {area: self.model.new_bool_var(area) for area in areas}
        self.model.add(sum(chosen.values()) == self.placed[name])
        for area, node_ids in areas.items():
            for node_id in node_ids:
                self.model.add(self.on[name, node_id] <= chosen[area])
        spanned = sum(self.on[name, node.node_id] for node in self.case.topology.nodes)
        self.bill.append(cost.SPAN * (spanned - self.placed[name]))

    def _any(self, of: list[Any]) -> Any:
        either = self.model.new_bool_var("any")
        self.model.add_max_equality(either, of)
        return either

    def _crowded(self) -> None:
        racks: dict[str, list[str]] = defaultdict(list)
        for node in self.case.topology.nodes:
            racks[node.fails_with].append(node.node_id)
        for alike in self._alike().values():
            for node_ids in racks.values():
                here = [self._any([self.on[wish.engine_id, n] for n in node_ids]) for wish in alike]
                self.bill.append(cost.CROWDED * (sum(here) - self._any(here)))

    def _apart(self) -> None:
        fabrics: dict[str, list[str]] = defaultdict(list)
        for node in self.case.topology.nodes:
            fabrics[node.fabric].append(node.node_id)
        groups = self._alike()
        for (model, role), alike in groups.items():
            partners = groups.get((model, role.partner)) if role.partner else None
            if not partners:
                continue
            there = self._any([self.placed[wish.engine_id] for wish in partners])
            for wish in alike:
                together = []
                for node_ids in fabrics.values():
                    near = self.model.new_bool_var("near")
                    self.model.add(near <= sum(self.on[wish.engine_id, n] for n in node_ids))
                    self.model.add(near <= sum(self.on[p.engine_id, n] for p in partners for n in node_ids))
                    together.append(near)
                apart = self.model.new_bool_var("apart")
                self.model.add(apart + sum(together) >= there + self.placed[wish.engine_id] - 1)
                self.bill.append(cost.APART * apart)

    def _alike(self) -> dict[Any, list[Request]]:
        groups: dict[Any, list[Request]] = defaultdict(list)
        for wish in self.case.wishes:
            groups[wish.kin].append(wish)
        return groups
