"""Repair and refinement of one schedule for one budget, with each result simulated.

Repair evicts values until the schedule fits. Refinement removes recomputations where memory is
free. Deferral moves weight gradients to program points with free memory. The moves themselves are
in `moves` and `deferral`.
"""

from __future__ import annotations

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op
from rockmate.planning.candidate import Candidate, evaluate, fastest
from rockmate.planning.deferral import (
    FirstReaders,
    defer,
    deferrable_ops,
    first_readers,
    insertion_points,
)
from rockmate.planning.moves import remove_recomputations, spill_until_feasible
from rockmate.schedule.schedule import Schedule

# Stop deferral after this many attempts in a row without gain. Each stands at fewer live bytes than
# the one before.
_MAX_FAILED_DEFERRALS = 4


class ScheduleRefiner:
    """Repairs and refines schedules of one graph."""

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self._graph = graph
        self._costs = costs

    def evaluate(self, schedule: Schedule) -> Candidate:
        """Simulates a schedule."""
        return evaluate(self._graph, schedule, self._costs)

    def repair_and_refine(
        self, candidate: Candidate, budget_bytes: int, prices: Costs | None = None
    ) -> Candidate | None:
        """Makes a schedule fit the budget and then use all of it; None if repair fails.

        Args:
            candidate: the schedule.
            budget_bytes: limit on the simulated peak.
            prices: the costs that rank the evictions; None for the refiner's own.
        """
        repaired = self.repair(candidate, budget_bytes, prices)
        if repaired is None:
            return None
        refined = self.refine(repaired, budget_bytes)
        return fastest(repaired, refined if refined.peak_bytes <= budget_bytes else None)

    def repair(
        self, candidate: Candidate, budget_bytes: int, prices: Costs | None = None
    ) -> Candidate | None:
        """Evicts values until the schedule fits the budget; None if that fails.

        Args:
            candidate: the schedule to repair.
            budget_bytes: limit on the simulated peak.
            prices: the costs that rank the evictions; None for the refiner's own.
        """
        if candidate.peak_bytes <= budget_bytes:
            return candidate
        costs = prices or self._costs
        schedule = spill_until_feasible(
            self._graph, costs, candidate.schedule, candidate.simulation, budget_bytes
        )
        repaired = None if schedule is None else self.evaluate(schedule)
        return repaired if repaired is not None and repaired.peak_bytes <= budget_bytes else None

    def refine(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """Removes recomputations where memory is free.

        The result may exceed the budget, since live bytes are estimated.
        """
        schedule = remove_recomputations(
            self._graph, self._costs, candidate.schedule, candidate.simulation, budget_bytes
        )
        return candidate if schedule is candidate.schedule else self.evaluate(schedule)

    def defer_weight_gradients(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """Defers weight gradients, one by one, where the freed memory makes the schedule faster."""
        tried: set[Op] = set()
        num_failed = 0
        readers = first_readers(self._graph, candidate.schedule)
        while num_failed < _MAX_FAILED_DEFERRALS:
            position = self._fullest_deferrable(candidate, readers, tried)
            if position is None:
                break
            tried.add(self._graph.ops[candidate.schedule.steps[position]])
            deferred = self._defer(candidate, readers, position, budget_bytes)
            if deferred is None:
                num_failed += 1
            else:
                candidate, num_failed = deferred, 0
                readers = first_readers(self._graph, candidate.schedule)
        return candidate

    def _fullest_deferrable(
        self, candidate: Candidate, readers: FirstReaders, tried: set[Op]
    ) -> int | None:
        """The position of a deferrable op not `tried`, while most bytes are live."""
        live_bytes = candidate.simulation.live_bytes
        left = {op.index for op in deferrable_ops(self._graph) - tried}
        fullest, most_bytes = None, 0
        for position, index in enumerate(candidate.schedule.steps):
            if index not in left:
                continue
            # A result that waits for a reader takes memory up to that one.
            is_waiting = readers.waiting_bytes[position] > 0
            end = readers.ends[position] if is_waiting else position + 1
            num_bytes = max(live_bytes[position:end])
            if num_bytes > most_bytes:
                fullest, most_bytes = position, num_bytes
        return fullest

    def _defer(
        self, candidate: Candidate, readers: FirstReaders, position: int, budget_bytes: int
    ) -> Candidate | None:
        """A faster schedule with the run at `position` deferred and the rest refined; or None."""
        schedule, simulation = candidate.schedule, candidate.simulation
        for place in insertion_points(
            self._graph, self._costs, schedule, simulation, readers, position, budget_bytes
        ):
            found = self.evaluate(defer(self._graph, schedule, position, place))
            if found.peak_bytes <= budget_bytes:
                found = self.refine(found, budget_bytes)
                if found.peak_bytes <= budget_bytes and found.time_ms < candidate.time_ms:
                    return found
        return None
