"""Schedules that recompute each value at most once, from the knapsack over the whole graph.

Such a schedule saves a set of values and recomputes all others once, as late as possible. The set
is an optimum of the precedence-constrained knapsack (`checkmate`), so no set of the same bytes
takes less recompute time. The knapsack bounds the saved bytes. It does not see peaks, and it cannot
recompute a value twice.
"""

from __future__ import annotations

from collections.abc import Collection

from checkmate import Curve
from rockmate.bound.knapsack import knapsack_of
from rockmate.bound.solver_time import SolverTime
from rockmate.costs.cost import Costs
from rockmate.graph.blocks import BlockChain
from rockmate.graph.ir import Graph, Storage
from rockmate.graph.marking import forced_recomputations
from rockmate.planning.lowering import lower_saved
from rockmate.schedule.schedule import Schedule


class KnapsackFamily:
    """The knapsack schedules of a graph, by the bytes that they may save.

    Args:
        graph: ops and storages.
        chain: its blocks; the backward runs in their order.
        costs: of its ops.
        solver_time: the time that the preparation shares with other solves. Each answer may take
            as much again.
    """

    def __init__(
        self, graph: Graph, chain: BlockChain, costs: Costs, *, solver_time: SolverTime
    ) -> None:
        self._graph, self._chain, self._time_limit_s = graph, chain, solver_time.limit_s
        outputs = {storage for storage in graph.storages if storage.is_output}
        self._output_bytes = sum(storage.num_bytes for storage in outputs)
        forced = forced_recomputations(graph.forward_ops, graph.backward_ops)
        problem, self._values = knapsack_of(
            graph.forward_ops, graph.backward_ops, costs, available=outputs, recomputed=forced
        )
        with solver_time.for_one_solve() as time_limit_s:
            self._curve = Curve(problem, time_limit_s=time_limit_s)

    @property
    def num_unproved(self) -> int:
        """1 if a time limit stopped a solve of the knapsack, else 0."""
        return int(self._curve.is_cut_short)

    def fastest_saving(self, max_saved_bytes: int) -> Schedule | None:
        """The fastest schedule that saves at most so many bytes, outputs included; None if none."""
        limit_bytes = max_saved_bytes - self._output_bytes
        plan = self._curve.plan(limit_bytes, time_limit_s=self._time_limit_s)
        if plan is None:
            return None
        return self.schedule_saving({self._values[value] for value in plan.saved})

    def schedule_saving(self, saved: Collection[Storage]) -> Schedule:
        """The schedule that saves these values, without those that marks recompute."""
        kept = [storage for storage in saved if not storage.must_recompute]
        return lower_saved(self._graph, self._chain, kept)
