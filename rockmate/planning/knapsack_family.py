"""Schedules of one level: save a set of values, recompute everything else once, as late as possible.

The set is an optimum of the whole graph's knapsack, so none of the same bytes recomputes less. What the knapsack cannot do is
recompute a value twice, and it does not see peaks.
"""

from __future__ import annotations

from collections.abc import Collection

from checkmate import Curve
from rockmate.bound.knapsack import knapsack_of
from rockmate.bound.solver_time import SolverTime
from rockmate.costs.cost import Costs
from rockmate.graph.blocks import BlockChain
from rockmate.graph.ir import Graph, Storage
from rockmate.planning.lowering import lower_saved
from rockmate.schedule.schedule import Schedule


class KnapsackFamily:
    """The schedules of one level of a graph, by the bytes that they may save."""

    def __init__(
        self, graph: Graph, chain: BlockChain, costs: Costs, *, solver_time: SolverTime
    ) -> None:
        """Prepares the knapsack.

        Args:
            graph: ops and storages.
            chain: its blocks, in whose order the backward runs.
            costs: of its ops.
            solver_time: what preparing it shares with other solves; an answer may take as much again.
        """
        self._graph, self._chain, self._time_limit_s = graph, chain, solver_time.limit_s
        held = {storage for storage in graph.storages if storage.is_output}
        self._held_bytes = sum(storage.num_bytes for storage in held)
        problem, self._values = knapsack_of(
            graph.forward_ops, graph.backward_ops, costs, available=held
        )
        with solver_time.for_one_solve() as time_limit_s:
            self._curve = Curve(problem, time_limit_s=time_limit_s)

    @property
    def num_unproved(self) -> int:
        """1 if a time limit has kept the knapsack from being solved to the end, else 0."""
        return int(self._curve.is_cut_short)

    def saving(self, max_saved_bytes: int) -> Schedule | None:
        """The fastest that saves at most so many bytes, with what the user holds; None if there is none."""
        plan = self._curve.plan(max_saved_bytes - self._held_bytes, time_limit_s=self._time_limit_s)
        return None if plan is None else self.keeping({self._values[value] for value in plan.saved})

    def keeping(self, saved: Collection[Storage]) -> Schedule:
        """The schedule that saves these values."""
        return lower_saved(self._graph, self._chain, saved)
