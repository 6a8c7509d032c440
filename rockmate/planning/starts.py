"""Warm starts: the schedules that the local search begins with, each solved on demand.

Most budgets need only some of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property, partial

from checkmate import Curve
from rockmate.bound.knapsack import knapsack_of
from rockmate.bound.lower_bound import LowerBound
from rockmate.costs.cost import unit_times
from rockmate.graph.ir import Storage
from rockmate.graph.marking import forced_recomputations
from rockmate.planning.block_options import Solving
from rockmate.planning.candidate import ScheduleMaker
from rockmate.planning.lowering import lower_saved
from rockmate.planning.rotor_family import RotorFamily
from rockmate.schedule.schedule import Schedule

# Number of schedules from the tight end of the table with unit times that start the search for the
# smallest peak.
_NUM_MIN_PEAK_STARTS = 4
# Resolution of that table: only its tight end matters.
_MIN_PEAK_SLOTS = 50
# Span lengths of that table, in blocks. Longer spans double the table's time, and spilling reaches
# the same peak without them.
_MIN_PEAK_SPANS = (1, 2)
# Resolution of a table that only has to give the smallest peak, which is exact at any resolution.
_ONE_SLOT = 1


class WarmStarts:
    """Warm starts from the relaxation, the knapsack and rotor's table.

    Args:
        solving: the graph and its blocks.
        lower_bound: of its schedules' times.
        max_bytes: the largest budget that matters.
    """

    def __init__(self, solving: Solving, lower_bound: LowerBound, *, max_bytes: int) -> None:
        self._solving, self._lower_bound, self._max_bytes = solving, lower_bound, max_bytes

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
        """The fastest schedule that saves at most so many bytes and recomputes the rest once.

        None if there is none.
        """
        return self._knapsack.fastest_saving(max_saved_bytes)

    def from_rotor(self) -> Sequence[ScheduleMaker]:
        """Schedules that may recompute a value several times, in order of growing solver budget."""
        return RotorFamily(self._solving, max_bytes=self._max_bytes).makers()

    def min_peak(self) -> Sequence[ScheduleMaker]:
        """Schedules of small peaks; equal for equal graphs, whatever the op times.

        They are the tightest of two tables that count ops instead of timing them.
        One has several options a block. In the other, each block saves everything or is recomputed
        as a whole, so the result is never worse than Rotor's own.
        """
        solving = replace(self._solving, costs=unit_times(self._solving.costs))
        family = partial(RotorFamily, solving, max_bytes=self._max_bytes)
        with_options = family(max_slots=_MIN_PEAK_SLOTS, spans=_MIN_PEAK_SPANS)
        tightest = with_options.makers()[:_NUM_MIN_PEAK_STARTS]
        plain_rotor = family(max_slots=_ONE_SLOT, is_all_or_nothing=True)
        return [*tightest, *plain_rotor.makers()[:1]]

    @cached_property
    def _knapsack(self) -> KnapsackFamily:
        return KnapsackFamily(self._solving)


class KnapsackFamily:
    """Schedules that recompute each value at most once, by the bytes that they may save.

    Such a schedule saves a set of values and recomputes all others once, as late as possible. The
    set is on the convex hull of the precedence-constrained knapsack (`checkmate`), so no set of the
    same bytes takes less recompute time. The knapsack does not see peaks, and it cannot recompute a
    value twice.

    Args:
        solving: the graph and its blocks; the backward runs in their order.
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
        self._curve = Curve(problem)

    def fastest_saving(self, max_saved_bytes: int) -> Schedule | None:
        """The fastest of those that save at most so many bytes, outputs included; None if none."""
        plan = self._curve.plan(max_saved_bytes - self._output_bytes)
        if plan is None:
            return None
        return self.schedule_saving({self._values[value] for value in plan.saved})

    def schedule_saving(self, saved: Collection[Storage]) -> Schedule:
        """The schedule that saves these values, without those that marks recompute."""
        kept = [storage for storage in saved if not storage.must_recompute]
        return lower_saved(self._solving.graph, self._solving.chain, kept)
