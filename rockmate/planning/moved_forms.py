"""Plans with moves: schedules for larger budgets, brought within a budget by moves.

Recomputation and moves are chosen together in this way: a schedule for a budget B' >= B recomputes
what does not fit B', and what exceeds B of it moves. Of a grid of B', which is refined around its
best, the fastest is taken, by the replay in lanes. The schedule without moves for B itself is one
of them, so a plan with moves never takes longer than that without. Schedules for larger budgets
serve every smaller one, so many budgets take little longer than one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from math import inf, sqrt

from rockmate.bound.moved import MovedBound, with_moves
from rockmate.bound.protocol import Bounds
from rockmate.graph.step_options import StepOptions
from rockmate.offload.request import OffloadRequest
from rockmate.plan.chunking_notes import ChunkingNotes
from rockmate.planning.baseline_search import FRONTIER_POINTS
from rockmate.planning.candidate import (
    Candidate,
    by_peak,
    by_time,
    evaluate,
    frontier_at,
    linspace_int,
)
from rockmate.planning.free_values import with_free_values
from rockmate.planning.moving import MoveFinder
from rockmate.planning.step_forms import StepForms
from rockmate.planning.strategies import UNMOVED
from rockmate.planning.variant import Variant
from rockmate.schedule.schedule import baseline_schedule, finish
from rockmate.step import CapturedStep

# Budgets whose schedules moves begin with: shares of the baseline's peak, each the last one divided
# by this ratio, and how often the grid is refined around the best of them.
_RATIO = 1.25
_NUM_REFINEMENTS = 2
# A plan further above the bound than this share of the baseline's time is searched for from the
# bound's relaxation, with these shares of the budget left to values on their way.
_FAR, _ROOMS = 0.02, (0.0, 0.05, 0.1, 0.2, 0.35)
# How often, if nothing is found, the largest values stay and the search begins again.
_NUM_RETRIES = 2
# The only strategy with moves. The others are there to compare with.
_STRATEGY = "rockmate"

Found = tuple[Variant, Candidate]


class MovedForms(StepForms):
    """The forms of a step whose values may move.

    Args:
        forms: of the step; their costs have the rates of the link.
        request: where values move to.
    """

    def __init__(self, forms: StepForms, request: OffloadRequest) -> None:
        self._forms = forms
        self._request = request
        self.unchunked = forms.unchunked
        self._starts: dict[int, Found | None] = {}
        self._finders: dict[Variant, MoveFinder] = {}
        self._minimum: Candidate | None = None

    def step_for(self, options: StepOptions) -> CapturedStep:
        """See `StepForms.step_for`."""
        return self._forms.step_for(options)

    def notes(self, variant: Variant, budget_bytes: int) -> ChunkingNotes:
        """See `StepForms.notes`."""
        return self._forms.notes(variant, budget_bytes)

    def best_within(self, budget_bytes: int, strategy: str) -> Found | None:
        """See `StepForms.best_within`."""
        unmoved = self._forms.best_within(budget_bytes, _unmoved(strategy))
        return self._moved_within(budget_bytes, unmoved) if strategy == _STRATEGY else unmoved

    def best_within_each(
        self, budgets: Sequence[int], *, progress: bool = False
    ) -> dict[int, Found]:
        """See `StepForms.best_within_each`."""
        found = self._forms.best_within_each(budgets, progress=progress)
        moved = ((each, self._moved_within(each, found.get(each))) for each in budgets)
        return {budget: best for budget, best in moved if best is not None}

    def frontier(self, strategy: str) -> list[tuple[int, Candidate]]:
        """See `StepForms.frontier`."""
        if strategy != _STRATEGY:
            return self._forms.frontier(_unmoved(strategy))
        smallest = self.minimum(strategy).peak_bytes
        largest = max(smallest, self.unchunked.baseline.peak_bytes)

        def best_within(budget_bytes: int) -> Candidate | None:
            found = self.best_within(budget_bytes, strategy)
            return None if found is None else found[1]

        return frontier_at(linspace_int(smallest, largest, FRONTIER_POINTS), best_within)

    def bounds_within(self, budget_bytes: int) -> Bounds:
        """See `StepForms.bounds_within`."""
        bounds = self._forms.bounds_within(budget_bytes)
        return with_moves(bounds, self._request.device_type, self._request.host_bytes)

    def minimum(self, strategy: str) -> Candidate:
        """See `StepForms.minimum`."""
        unmoved = self._forms.minimum(_unmoved(strategy))
        if strategy != _STRATEGY:
            return unmoved
        if self._minimum is None:
            variant = self.unchunked
            baseline = evaluate(variant.graph, baseline_schedule(variant.graph), variant.costs)
            smallest = variant.search(_STRATEGY).minimum()
            least = [self._least(variant, start) for start in (smallest, baseline)]
            self._minimum = min(unmoved, *least, key=by_peak)
        return self._minimum

    def min_peak(self, strategy: str) -> Candidate:
        """See `StepForms.min_peak`."""
        unmoved = self._forms.min_peak(_unmoved(strategy))
        if strategy != _STRATEGY:
            return unmoved
        return min(unmoved, self.minimum(strategy), key=by_peak)

    def _least(self, variant: Variant, unmoved: Candidate) -> Candidate:
        """A schedule brought to the smallest peak that moves reach."""
        finder = self._finder(variant)
        least_bytes = finder.least_peak(unmoved.schedule, unmoved.simulation)
        moved = self._moved(variant, unmoved, least_bytes)
        return unmoved if moved is None else min(unmoved, moved, key=by_peak)

    def _moved_within(self, budget_bytes: int, unmoved: Found | None) -> Found | None:
        """The fastest schedule found within a budget; None if moves do not bring any there.

        Args:
            budget_bytes: the budget.
            unmoved: the fastest without moves; None if none fits.
        """
        top_bytes = self.unchunked.baseline.peak_bytes
        smallest = self.unchunked.search(_STRATEGY).minimum()
        found = [unmoved] if unmoved is not None else []
        if smallest.peak_bytes > budget_bytes:
            moved = self._moved(self.unchunked, smallest, budget_bytes)
            found += [] if moved is None else [(self.unchunked, moved)]
        times: dict[int, float] = {}
        grid = _grid(max(budget_bytes, smallest.peak_bytes), top_bytes)
        for _ in range(_NUM_REFINEMENTS + 1):
            for start_bytes in grid:
                limit_ms = min((each.time_ms for _, each in found), default=inf)
                moved = self._from_start(start_bytes, budget_bytes, limit_ms)
                times[start_bytes] = inf if moved is None else moved[1].time_ms
                found += [] if moved is None else [moved]
            grid = _between(times)
        best = min(found, key=lambda each: by_time(each[1]), default=None)
        variant = self.unchunked
        bound = with_moves(variant.lower_bound, self._request.device_type, self._request.host_bytes)
        assert isinstance(bound, MovedBound)
        limit_ms = bound.bound_ms(budget_bytes) + _FAR * variant.baseline.time_ms
        if limit_ms < inf and (best is None or best[1].time_ms > limit_ms):
            found += self._from_relaxation(bound, budget_bytes)
        return min(found, key=lambda each: by_time(each[1]), default=None)

    def _from_relaxation(self, bound: MovedBound, budget_bytes: int) -> list[Found]:
        """Schedules that move what the relaxation of the bound moves.

        What they recompute is searched for with these values free of charge, and some room for
        those that are on their way.
        """
        moved = bound.moved_values(budget_bytes)
        found: list[Found] = []
        for _ in range(_NUM_RETRIES + 1):
            if found or not moved:
                break
            found = self._with_free_values(moved, budget_bytes)
            moved = self._without_largest(moved)
        return found

    def _without_largest(self, values: Collection[int]) -> frozenset[int]:
        """Those that may find room on their way back where the largest do not."""
        storages = self.unchunked.graph.storages
        most = max(storages[value].num_bytes for value in values)
        return frozenset(value for value in values if storages[value].num_bytes < most)

    def _with_free_values(self, moved: Collection[int], budget_bytes: int) -> list[Found]:
        variant = self.unchunked
        graph = with_free_values(variant.graph, moved)
        free = variant.with_graph(graph)
        found: list[Found] = []
        for room in _ROOMS:
            start = free.local_search.best_within(int((1 - room) * budget_bytes))
            if start is None:
                continue
            schedule = finish(variant.graph, start.schedule.forward, start.schedule.backward)
            whole = evaluate(variant.graph, schedule, variant.costs)
            candidate = self._moved(variant, whole, budget_bytes, moved)
            found += [] if candidate is None else [(variant, candidate)]
        return found

    def _from_start(self, start_bytes: int, budget_bytes: int, limit_ms: float) -> Found | None:
        """The schedule for a larger budget, moved within a budget; None if it is no faster."""
        if start_bytes not in self._starts:
            self._starts[start_bytes] = self._forms.best_within(start_bytes, _STRATEGY)
        start = self._starts[start_bytes]
        if start is None or start[1].time_ms >= limit_ms:
            return None
        moved = self._moved(*start, budget_bytes)
        return None if moved is None else (start[0], moved)

    def _moved(
        self,
        variant: Variant,
        start: Candidate,
        budget_bytes: int,
        preferred: Collection[int] = (),
    ) -> Candidate | None:
        found = self._finder(variant).within(
            start.schedule, start.simulation, budget_bytes, preferred
        )
        if found is None:
            return None
        schedule, simulation = found
        return Candidate(schedule=schedule, simulation=simulation, is_proved=start.is_proved)

    def _finder(self, variant: Variant) -> MoveFinder:
        if variant not in self._finders:
            self._finders[variant] = MoveFinder(variant.graph, variant.costs, self._request)
        return self._finders[variant]


def _unmoved(strategy: str) -> str:
    """The strategy of the forms without moves that stands for one with them."""
    return _STRATEGY if strategy == UNMOVED else strategy


def _grid(least_bytes: int, top_bytes: int) -> list[int]:
    """Budgets from the largest down, whatever budget is planned, so that they are planned once."""
    found, share = [], 1.0
    while share * top_bytes > least_bytes:
        found.append(int(share * top_bytes))
        share /= _RATIO
    return found


def _between(times: Mapping[int, float]) -> list[int]:
    """The middles between the best of some budgets and its neighbours."""
    best = min(times, key=times.__getitem__, default=None)
    if best is None or times[best] == inf:
        return []
    ordered = sorted(times)
    place = ordered.index(best)
    around = ordered[max(place - 1, 0) : place + 2]
    middles = (int(sqrt(one * other)) for one, other in pairwise(around))
    return [middle for middle in middles if middle not in times]
