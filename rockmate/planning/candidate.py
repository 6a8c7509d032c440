"""A simulated schedule, and choices among several: by time, by peak, by budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph
from rockmate.planning.mark_repair import with_marks_kept
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import Simulation, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule with the simulator's verdict.

    Attributes:
        schedule: the schedule.
        simulation: its peak and time.
        is_proved: False if a solver stopped at its time limit on the way to this schedule, or
            solved for a smaller budget.
    """

    schedule: Schedule
    simulation: Simulation
    is_proved: bool = True

    @property
    def peak_bytes(self) -> int:
        """Its simulated peak."""
        return self.simulation.peak_bytes

    @property
    def time_ms(self) -> float:
        """Its simulated time."""
        return self.simulation.time_ms


def evaluate(graph: Graph, schedule: Schedule, costs: Costs) -> Candidate:
    """Simulates a schedule, once it keeps the user's marks."""
    schedule = with_marks_kept(graph, schedule)
    return Candidate(schedule=schedule, simulation=simulate(graph, schedule, costs))


def is_worth_refining(start: Candidate, budget_bytes: int, incumbent_ms: float) -> bool:
    """Whether a start fits, or is faster than the incumbent; repair takes time and adds time."""
    return start.peak_bytes <= budget_bytes or start.time_ms < incumbent_ms


def fastest(one: Candidate, other: Candidate | None) -> Candidate:
    """The faster of two candidates; the smaller peak breaks ties."""
    return one if other is None else min(one, other, key=by_time)


def by_time(candidate: Candidate) -> tuple[float, int]:
    """Sort key: the fastest first; the smaller peak breaks ties."""
    return candidate.time_ms, candidate.peak_bytes


def by_peak(candidate: Candidate) -> tuple[int, float]:
    """Sort key: the smallest peak first; the shorter time breaks ties."""
    return candidate.peak_bytes, candidate.time_ms


def feasible(candidates: Sequence[Candidate], budget_bytes: int) -> list[Candidate]:
    """The candidates within the budget, the fastest first."""
    return sorted((c for c in candidates if c.peak_bytes <= budget_bytes), key=by_time)


def repairable(candidates: Sequence[Candidate], budget_bytes: int) -> list[Candidate]:
    """The candidates above the budget, the smallest peak first."""
    return sorted((c for c in candidates if c.peak_bytes > budget_bytes), key=by_peak)


def frontier_at(
    budgets: Sequence[int], best_within: Callable[[int], Candidate | None]
) -> list[tuple[int, Candidate]]:
    """The nondominated pairs of budget and best candidate: budgets grow, times fall.

    Args:
        budgets: in growing order.
        best_within: the best candidate of a budget; None if there is none.
    """
    points: list[tuple[int, Candidate]] = []
    for budget_bytes in budgets:
        best = best_within(budget_bytes)
        if best is not None and (not points or best.time_ms < points[-1][1].time_ms):
            points.append((budget_bytes, best))
    return points


def linspace_int(low: int, high: int, num_points: int) -> list[int]:
    """Whole numbers at equal distances from `low` to `high`, both included."""
    return [low + (high - low) * step // (num_points - 1) for step in range(num_points)]


def subsample_indices(length: int, num_points: int) -> list[int]:
    """At most `num_points` indices below `length` at equal distances, both ends included."""
    if length <= num_points:
        return list(range(length))
    return [round(point * (length - 1) / (num_points - 1)) for point in range(num_points)]
