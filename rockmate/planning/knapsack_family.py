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
from rockmate.graph.ir import Storage
from rockmate.graph.marking import forced_recomputations
from rockmate.planning.block_options import Solving
from rockmate.planning.lowering import lower_saved
from rockmate.schedule.schedule import Schedule


class KnapsackFamily:
    """The knapsack schedules of a graph, by the bytes that they may save.

    Args:
        solving: the graph and its blocks; the backward runs in their order. The preparation shares
            its time with other solves. Each answer may take as much again.
    """

    def __init__(self, solving: Solving) -> None:
        graph, costs = solving.graph, solving.costs
        self._solving = solving
        outputs = {storage for storage in graph.storages if storage.is_output}
        self._output_bytes = sum(storage.num_bytes for storage in outputs)
        forced = forced_recomputations(graph.forward_ops, graph.backward_ops)
        problem, self._values = knapsack_of(
            graph.forward_ops, graph.backward_ops, costs, available=outputs, recomputed=forced
        )
        with solving.time.for_one_solve() as time_limit_s:
            self._curve = Curve(problem, time_limit_s=time_limit_s)

    def fastest_saving(self, max_saved_bytes: int) -> Schedule | None:
        """The fastest schedule that saves at most so many bytes, outputs included; None if none."""
        limit_bytes = max_saved_bytes - self._output_bytes
        with self._solving.time.restarted().for_one_solve() as time_limit_s:
            plan = self._curve.plan(limit_bytes, time_limit_s=time_limit_s)
        if plan is None:
            return None
        return self.schedule_saving({self._values[value] for value in plan.saved})

    def schedule_saving(self, saved: Collection[Storage]) -> Schedule:
        """The schedule that saves these values, without those that marks recompute."""
        kept = [storage for storage in saved if not storage.must_recompute]
        return lower_saved(self._solving.graph, self._solving.chain, kept)
