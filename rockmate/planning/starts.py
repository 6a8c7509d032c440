"""Warm starts: the schedules that the local search begins with, each solved on demand.

Most budgets need only some of them.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from checkmate import Curve
from rockmate.bound.knapsack import knapsack_of
from rockmate.bound.lower_bound import LowerBound
from rockmate.costs.cost import Costs, unit_times
from rockmate.graph.blocks import BlockChain
from rockmate.graph.ir import Graph, Storage
from rockmate.graph.marking import forced_recomputations
from rockmate.planning.lowering import lower_saved
from rockmate.planning.rotor_family import RotorFamily
from rockmate.schedule.schedule import Schedule

# Number of schedules of the knapsack that start the search for the smallest peak.
_NUM_SMALL = 6


class WarmStarts:
    """Warm starts from the relaxation, the knapsack and, of the smallest peak, Rotor.

    The backward runs in the order of the chain's blocks.
    """

    def __init__(
        self, graph: Graph, chain: BlockChain, costs: Costs, lower_bound: LowerBound
    ) -> None:
        self._graph, self._chain, self._costs = graph, chain, costs
        self._lower_bound = lower_bound

    def bound_ms(self, budget_bytes: int) -> float:
        """A lower bound on the time of every schedule within the budget."""
        return self._lower_bound.bound_ms(budget_bytes)

    def from_relaxation(self, budget_bytes: int) -> Schedule | None:
        """A schedule with the lower bound's own time; its peak may exceed the budget.

        None if the budget is infeasible in the relaxation.
        """
        saved = self._lower_bound.saved_values_within(budget_bytes)
        return None if saved is None else self._knapsack.schedule_saving(saved)

    def from_knapsack(self, max_saved_bytes: int) -> Schedule | None:
        """The fastest schedule of the family that saves at most so many bytes; None if none."""
        return self._knapsack.fastest_saving(max_saved_bytes)

    def small(self) -> list[Schedule]:
        """Schedules of small peaks; equal for equal graphs, whatever the op times.

        They count ops instead of timing them: Rotor's smallest, so that nothing is feasible for
        Rotor alone, and some of the knapsack's.
        """
        family = self._graph, self._chain, unit_times(self._costs)
        return [RotorFamily(*family).smallest(), *KnapsackFamily(*family).spread(_NUM_SMALL)]

    @cached_property
    def _knapsack(self) -> KnapsackFamily:
        return KnapsackFamily(self._graph, self._chain, self._costs)


class KnapsackFamily:
    """Schedules that recompute each value at most once, by the bytes that they may save.

    Such a schedule saves a set of values and recomputes all others once, as late as possible. The
    set is on the convex hull of the precedence-constrained knapsack (`checkmate`), so no set of the
    same bytes takes less recompute time. The knapsack does not see peaks, and it cannot recompute a
    value twice. The backward runs in the order of the chain's blocks.
    """

    def __init__(self, graph: Graph, chain: BlockChain, costs: Costs) -> None:
        self._graph, self._chain = graph, chain
        outputs = {storage for storage in graph.storages if storage.is_output}
        self._output_bytes = sum(storage.num_bytes for storage in outputs)
        forced = forced_recomputations(graph.forward_ops, graph.backward_ops)
        problem, self._values = knapsack_of(
            graph.forward_ops, graph.backward_ops, costs, available=outputs, recomputed=forced
        )
        self._curve = Curve(problem)

    def fastest_saving(self, max_saved_bytes: int) -> Schedule | None:
        """The fastest of those that save at most so many bytes, outputs included; None if none."""
        plan = self._curve.plan(max_saved_bytes - self._output_bytes)
        return None if plan is None else self.schedule_saving(self._storages(plan.saved))

    def spread(self, max_schedules: int) -> list[Schedule]:
        """At most so many, at least 2, from the one that saves most bytes to that of the fewest."""
        plans = self._curve.plans(max_schedules)
        return [self.schedule_saving(self._storages(plan.saved)) for plan in plans]

    def _storages(self, values: Collection[int]) -> list[Storage]:
        return [self._values[value] for value in sorted(values)]

    def schedule_saving(self, saved: Collection[Storage]) -> Schedule:
        """The schedule that saves these values, without those that marks recompute."""
        kept = [storage for storage in saved if not storage.must_recompute]
        return lower_saved(self._graph, self._chain, kept)
