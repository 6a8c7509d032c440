"""A simulated schedule, and choices among several: by time, by peak, by budget."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op, Storage
from rockmate.schedule.schedule import Schedule, finish
from rockmate.schedule.simulate import Simulation, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule with the simulator's verdict.

    Attributes:
        schedule: the schedule.
        simulation: its peak and time.
        is_proved: False if a solver stopped at its time limit on the way to this schedule, or
            solved for a smaller budget.
        resident_bytes: of frozen weights that stay in memory, where a budget bounds those, too.
    """

    schedule: Schedule
    simulation: Simulation
    is_proved: bool = True
    resident_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Its simulated peak, with the weights that a budget bounds."""
        return self.simulation.peak_bytes + self.resident_bytes

    @property
    def time_ms(self) -> float:
        """Its simulated time."""
        return self.simulation.time_ms


def evaluate(graph: Graph, schedule: Schedule, costs: Costs) -> Candidate:
    """Simulates a schedule, once it keeps the user's marks."""
    schedule = with_marks_kept(graph, schedule)
    return Candidate(schedule=schedule, simulation=simulate(graph, schedule, costs))


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


def around_best(times: Mapping[float, float]) -> Iterator[tuple[float, float]]:
    """The best of some points beside its neighbours, as pairs from the smaller to the larger.

    Args:
        times: of each point.
    """
    best = min(times, key=times.__getitem__)
    ordered = sorted(times)
    place = ordered.index(best)
    return pairwise(ordered[max(place - 1, 0) : place + 2])


def linspace_int(low: int, high: int, num_points: int) -> list[int]:
    """Whole numbers at equal distances from `low` to `high`, both included."""
    return [low + (high - low) * step // (num_points - 1) for step in range(num_points)]


def with_marks_kept(graph: Graph, schedule: Schedule) -> Schedule:
    """The schedule with each marked value made in the backward before it is read there.

    Solvers and families propose schedules without a thought for marks. Each goes through here
    before it is simulated. A marked value that is live at the border between forward and backward
    is recomputed right before its first read in the backward, together with whatever of its inputs
    is not in memory there. All else stays as it was, so a schedule that keeps the marks is returned
    as it is.
    """
    if not graph.must_recompute:
        return schedule
    writer = _Backward(graph, schedule)
    backward = writer.rewritten()
    return finish(graph, schedule.forward, backward) if writer.is_changed else schedule


class _Backward:
    """The backward of a schedule, written anew."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.is_changed = False
        self._ops = [graph.ops[index] for index in schedule.backward]
        self._made: set[Storage] = set()
        self._steps: list[int] = []
        # For each storage the positions at which it is made or read, and whether it is read there.
        self._events: dict[Storage, list[tuple[int, bool]]] = {}
        for position, op in enumerate(self._ops):
            for storage in op.reads:
                self._events.setdefault(storage, []).append((position, True))
            for storage in op.writes:
                self._events.setdefault(storage, []).append((position, False))

    def rewritten(self) -> list[int]:
        """The runs, with recomputations of marked values before their first reads."""
        for position, op in enumerate(self._ops):
            self._provide(op, position)
            self._steps.append(op.index)
            self._made.update(op.writes)
        return self._steps

    def _provide(self, op: Op, position: int) -> None:
        """Recomputes the marked values that an op reads and that the backward has not made yet."""
        missing = [s for s in op.reads if s.must_recompute and s not in self._made]
        if not missing:
            return
        self.is_changed = True
        inserted: set[Op] = set()
        pending = [storage.producer for storage in missing]
        while pending:
            maker = pending.pop()
            if maker is None or maker in inserted:
                continue
            inserted.add(maker)
            pending += [s.producer for s in maker.reads if not self._is_at_hand(s, position)]
        for maker in sorted(inserted, key=lambda each: each.index):
            self._steps.append(maker.index)
            self._made.update(maker.writes)

    def _is_at_hand(self, storage: Storage, position: int) -> bool:
        """Whether a value need not be recomputed to be read before the run at `position`."""
        maker = storage.producer
        if maker is None or storage.is_result or not maker.is_recomputable:
            return True
        if storage.must_recompute:
            return storage in self._made
        events = self._events.get(storage, [])
        if all(is_read for _, is_read in events):
            # The schedule never recomputes it, so the forward's value may live until here.
            return True
        place = bisect_left(events, (position, False))
        return place < len(events) and events[place][1]
