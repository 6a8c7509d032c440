"""Makes one schedule fit a budget and use all the room there is, by whatever change helps, held against the simulator each time."""

from __future__ import annotations

from functools import cached_property

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op
from rockmate.planning.candidate import Candidate, evaluate, fastest
from rockmate.planning.moves import (
    defer,
    deferrable_ops,
    insertion_points,
    remove_recomputations,
    result_and_workspace_bytes,
    spill_until_feasible,
)
from rockmate.schedule.schedule import Schedule

_LEAST_OWN = 0.03  # of the budget, which a run takes beside what it reads: of less it gains little to put a run off ...
_FULL = 0.8  # ... or where less than that is in use ...
_MOST_IN_VAIN = 4  # ... or after so many in a row that gained nothing, each with less in use than the one before
_LONG_STEP = 2_000  # ops
_ATTEMPTS = 2  # at making room: the estimate of bytes in use can be off


class ScheduleRefiner:
    """Changes schedules of one graph, each time a little, and has the simulator say what became of them."""

    def __init__(self, graph: Graph, costs: Costs) -> None:
        """Holds ops, storages and their costs."""
        self._graph = graph
        self._costs = costs

    def evaluated(self, schedule: Schedule) -> Candidate:
        """The schedule, simulated."""
        return evaluate(self._graph, schedule, self._costs)

    def improved(self, candidate: Candidate, budget_bytes: int) -> Candidate | None:
        """What comes of a schedule when it is made to fit and then to use all the room; None if it cannot be made to fit."""
        fits = self.repair(candidate, budget_bytes)
        if fits is None:
            return None
        full = self.refine(fits, budget_bytes)
        return fastest(fits, full if full.peak_bytes <= budget_bytes else None)

    def repair(
        self, candidate: Candidate, budget_bytes: int, costs: Costs | None = None
    ) -> Candidate | None:
        """The schedule with values evicted until it fits, by other costs if there are any; None if that cannot be."""
        for _ in range(_ATTEMPTS):
            if candidate.peak_bytes <= budget_bytes:
                return candidate
            schedule = spill_until_feasible(
                self._graph,
                costs or self._costs,
                candidate.schedule,
                candidate.simulation,
                budget_bytes,
            )
            if schedule is None:
                return None
            candidate = self.evaluated(schedule)
        return candidate if candidate.peak_bytes <= budget_bytes else None

    def refine(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """The schedule with values kept where there is room for them; it may exceed the budget, since the room is estimated."""
        schedule = remove_recomputations(
            self._graph, self._costs, candidate.schedule, candidate.simulation, budget_bytes
        )
        return candidate if schedule is candidate.schedule else self.evaluated(schedule)

    def defer_weight_gradients(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """The schedule with gradients of parameters made later, one by one, where the room that leaves makes it faster.

        As it is where the step is long, of which that takes too long.
        """
        tried: set[Op] = set()
        num_in_vain = 0
        while (
            num_in_vain < _MOST_IN_VAIN
            and (position := self._fullest_that_can_wait(candidate, budget_bytes, tried))
            is not None
        ):
            tried.add(self._graph.ops[candidate.schedule.steps[position]])
            found = self._put_off(candidate, position, budget_bytes)
            candidate, num_in_vain = (candidate, num_in_vain + 1) if found is None else (found, 0)
        return candidate

    @property
    def is_long(self) -> bool:
        """Whether the step has so many ops that what takes longest is left out."""
        return len(self._graph.ops) > _LONG_STEP

    @cached_property
    def _can_wait(self) -> frozenset[Op]:
        return frozenset() if self.is_long else deferrable_ops(self._graph)

    @cached_property
    def _own_bytes(self) -> list[int]:
        return result_and_workspace_bytes(self._graph, self._costs).tolist()

    def _fullest_that_can_wait(
        self, candidate: Candidate, budget_bytes: int, tried: set[Op]
    ) -> int | None:
        """Of the runs that may be worth putting off, `tried` aside, the position of that with most bytes in use."""
        in_use = candidate.simulation.live_bytes
        waiting = {
            op.index
            for op in self._can_wait - tried
            if self._own_bytes[op.index] >= _LEAST_OWN * budget_bytes
        }
        places = (place for place, index in enumerate(candidate.schedule.steps) if index in waiting)
        return max(
            (place for place in places if in_use[place] >= _FULL * budget_bytes),
            key=in_use.__getitem__,
            default=None,
        )

    def _put_off(self, candidate: Candidate, position: int, budget_bytes: int) -> Candidate | None:
        """What is faster with the run at `position` made where there is room for it, None if nothing is."""
        schedule, simulation = candidate.schedule, candidate.simulation
        for place in insertion_points(
            self._graph, self._costs, schedule, simulation, position, budget_bytes
        ):
            found = self.evaluated(defer(self._graph, schedule, position, place))
            if found.peak_bytes <= budget_bytes:
                found = self.refine(found, budget_bytes)
                if found.peak_bytes <= budget_bytes and found.time_ms < candidate.time_ms:
                    return found
        return None
