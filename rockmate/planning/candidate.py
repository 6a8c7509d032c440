"""A schedule with the simulator's verdict on it, and choices among such."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import Simulation, simulate

MAX_EXCESS = 1.5  # peak over budget, of a schedule from which room is made at first


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule with the simulator's verdict on it.

    Attributes:
        schedule: the schedule.
        simulation: its peak and time.
        is_proved: False where a solver stopped at its time limit on the way to this very schedule, or answered for a smaller budget.
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
    """The schedule, simulated."""
    return Candidate(schedule=schedule, simulation=simulate(graph, schedule, costs))


def is_worth_refining(start: Candidate, budget_bytes: int, known_ms: float) -> bool:
    """Whether a schedule fits, or is faster than what is known: making room takes time."""
    return start.peak_bytes <= budget_bytes or start.time_ms < known_ms


def fastest(one: Candidate, other: Candidate | None) -> Candidate:
    """The faster of the two, of equal ones that of the smaller peak."""
    return one if other is None else min(one, other, key=by_time)


def by_time(candidate: Candidate) -> tuple[float, int]:
    """Sorts the fastest first, of equal ones that of the smaller peak."""
    return candidate.time_ms, candidate.peak_bytes


def by_peak(candidate: Candidate) -> tuple[int, float]:
    """Sorts the smallest peak first, of equal ones the faster."""
    return candidate.peak_bytes, candidate.time_ms


def feasible(candidates: Sequence[Candidate], budget_bytes: int) -> list[Candidate]:
    """Those within the budget, the fastest first."""
    return sorted((c for c in candidates if c.peak_bytes <= budget_bytes), key=by_time)


def infeasible(candidates: Sequence[Candidate], budget_bytes: int) -> list[Candidate]:
    """Those that exceed the budget, by half of it at most, in order."""
    return sorted(
        (c for c in candidates if budget_bytes < c.peak_bytes <= MAX_EXCESS * budget_bytes),
        key=by_peak,
    )


def nondominated(
    budgets: Sequence[int], best_within: Callable[[int], Candidate | None]
) -> list[tuple[int, Candidate]]:
    """Growing budgets and the best within them, less those whose time is no shorter than that of a smaller one."""
    points: list[tuple[int, Candidate]] = []
    for budget_bytes in budgets:
        best = best_within(budget_bytes)
        if best is not None and (not points or best.time_ms < points[-1][1].time_ms):
            points.append((budget_bytes, best))
    return points


def linspace_int(low: int, high: int, num_points: int) -> list[int]:
    """Budgets from `low` to `high`, both included."""
    return [low + (high - low) * step // (num_points - 1) for step in range(num_points)]


def subsample(length: int, num_points: int) -> list[int]:
    """Indices below `length`, both ends among them, evenly spread."""
    if length <= num_points:
        return list(range(length))
    return [round(point * (length - 1) / (num_points - 1)) for point in range(num_points)]
