"""The forms of a step, and the fastest schedule of all within a budget: one loop over all forms.

A form is a step and its costs: as captured, with fused kernels, and each of these in chunks. The
loop is a branch and bound. Each form has an initial schedule; the fastest comes first; a form is
left out if its lower bound, or what its search may gain at most by experience, is no faster than
the incumbent. Moves are tried from what it finds (`moved_search`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import inf

from rockmate.budget import Budget, is_share, slowdown_of
from rockmate.capture.options import Numerics
from rockmate.errors import InvalidBudgetError
from rockmate.graph.step_options import StepOptions
from rockmate.plan.record import ChunkingNotes
from rockmate.planning.candidate import Candidate, by_time, fastest, frontier_at, linspace_int
from rockmate.planning.chunkable_blocks import find_notes
from rockmate.planning.chunked_forms import ChunkedForms
from rockmate.planning.form import Form, Found, time_of
from rockmate.planning.moved_search import MovedSearch
from rockmate.planning.options import AT_HOME, Weights
from rockmate.planning.search_problem import StoppingRule
from rockmate.planning.step import CapturedStep
from rockmate.planning.strategies import BITWISE, DEFAULT, UNMOVED
from rockmate.planning.weights import WeightSearch
from rockmate.schedule.offload_request import OffloadRequest

# Share of an initial schedule's gap to the lower bound that the rest of the search may close.
_GAP_REDUCTION = 0.35
# The same for a quick start, which is further from what the search ends with.
_QUICK_GAP_REDUCTION = 0.6
# Number of budgets of a frontier; of "checkmate", each of which takes a solve of the whole graph.
FRONTIER_POINTS, _FRONTIER_SOLVES = 17, 9


class Forms:
    """The forms of a step.

    Args:
        whole: the forms without chunks; the step as captured first.
        form_of: finds the costs of a step in chunks.
        numerics: as for `Planner`.
        rule: when searches end.
        request: where values may move; None for nowhere.
        weights: which may be at home there.

    Attributes:
        captured: the step as captured.
        chunked: each form without chunks, with its forms in chunks.
        weights: the search for plans whose weights come and go; None without homes.
    """

    def __init__(
        self,
        whole: Sequence[Form],
        form_of: Callable[[CapturedStep], Form],
        *,
        numerics: Numerics,
        rule: StoppingRule,
        request: OffloadRequest | None = None,
        weights: Weights = "resident",
    ) -> None:
        self.captured = whole[0]
        self.chunked = [ChunkedForms(each, form_of, numerics=numerics, rule=rule) for each in whole]
        self._moved = None
        # Searches for other budgets, and for those of weights, ask for the same again.
        self._searched_within = cache(self._search_within)
        if request is not None:
            self._moved = MovedSearch(
                self.captured, request, self._searched_within, self._forms_within
            )
        self.weights = None
        if weights in AT_HOME:
            self.weights = WeightSearch(
                self.captured,
                weights == "all",
                self._resident_within,
                self._least_found,
                self._resident_minimum,
            )

    def check_budget(self, budget: Budget) -> None:
        """Raises `InvalidBudgetError` for a share of activations where it bounds weights, too."""
        if self.weights is not None and (is_share(budget) or slowdown_of(budget) is not None):
            msg = (
                f"budget {budget!r} is a share of what activations take, and with weights at home "
                'it bounds weights, too. Give bytes, or a size as "12GiB".'
            )
            raise InvalidBudgetError(msg)

    def _whole(self, strategy: str) -> list[Form]:
        """The forms without chunks that a strategy chooses from: "bitwise" has eager's kernels."""
        return [self.captured] if strategy == BITWISE else [each.whole for each in self.chunked]

    # --- one form ---

    def step_for(self, options: StepOptions) -> CapturedStep:
        """The step that was captured, and put in chunks, with these options."""
        chunked = self._chunked_of(options)
        for form in (chunked.whole, *chunked.known.values()):
            if form is not None and form.step.options == options:
                return form.step
        step = chunked.whole.step
        if options.kernels == "fused":  # as another rank has them
            step = step.fused(unfused=options.unfused)
        return step.with_chunks_of(options)

    def notes(self, form: Form, budget_bytes: int) -> Callable[[], ChunkingNotes]:
        """Finds how the chunkable blocks run in a form, and the time of a step without chunks."""
        blocks = self._chunked_of(form.step.options).blocks
        whole = partial(self.captured.local_search.best_within, budget_bytes)
        return partial(find_notes, blocks, form.step.options.loss_chunks, whole)

    def _chunked_of(self, options: StepOptions) -> ChunkedForms:
        """The forms with the kernels of these options, or the nearest to them."""

        def likeness(each: ChunkedForms) -> tuple[bool, bool]:
            own = each.whole.step.options
            return own.kernels == options.kernels, own.unfused == options.unfused

        return max(self.chunked, key=likeness)

    # --- the fastest schedule ---

    def best_within(self, budget_bytes: int, strategy: str) -> Found | None:
        """The fastest schedule found within the budget, and its form; None if none fits."""
        if self.weights is not None:
            return self.weights.best_within(budget_bytes, strategy)
        return self._resident_within(budget_bytes, strategy)

    def _resident_within(self, budget_bytes: int, strategy: str) -> Found | None:
        """The same with all weights in memory, which the budget does not bound."""
        found = self._unmoved_within(budget_bytes, strategy)
        if self._moved is None or strategy != DEFAULT:
            return found
        return self._moved.best_within(budget_bytes, found)

    def _unmoved_within(self, budget_bytes: int, strategy: str) -> Found | None:
        if strategy in (DEFAULT, UNMOVED):
            return self._searched_within(budget_bytes)
        each = ((form, form.search(strategy)) for form in self._whole(strategy))
        found = ((form, search.best_within(budget_bytes)) for form, search in each)
        fitting = (Found(form, candidate) for form, candidate in found if candidate)
        return min(fitting, key=time_of, default=None)

    def _search_within(self, budget_bytes: int) -> Found | None:
        """The fastest schedule of the default strategy without moves."""
        starts: list[Found] = []
        for chunked in self.chunked:
            starts += chunked.starts(budget_bytes, min(map(time_of, starts), default=inf))
        best: Found | None = None
        for form, quick in sorted(starts, key=lambda start: by_time(start.candidate)):
            bound_ms = form.lower_bound.bound_ms(budget_bytes)
            if _expected_ms(quick, bound_ms, _QUICK_GAP_REDUCTION) >= time_of(best):
                continue
            # The quick start may fit where the search's own smallest peak does not.
            start = fastest(quick, form.local_search.initial_within(budget_bytes))
            if _expected_ms(start, bound_ms, _GAP_REDUCTION) >= time_of(best):
                continue
            candidate = fastest(start, form.local_search.best_within(budget_bytes))
            if candidate.time_ms < time_of(best):
                best = Found(form, candidate)
        return best

    def _forms_within(self, budget_bytes: int) -> Iterator[Form]:
        """The forms that a plan for this budget may have."""
        for chunked in self.chunked:
            yield chunked.whole
            yield from chunked.forms_within(budget_bytes)

    def best_within_each(
        self, budgets: Sequence[int], *, progress: bool = False
    ) -> dict[int, Found]:
        """The schedules of the default strategy for many budgets, planned together.

        Budgets that no schedule fits are left out.
        """
        best: dict[int, Found] = {}
        if self.weights is not None:
            each = {budget: self.weights.best_within(budget, DEFAULT) for budget in budgets}
            return {budget: found for budget, found in each.items() if found is not None}
        for chunked in self.chunked:
            chunked.improve(best, budgets, progress=progress)
        if self._moved is not None:
            moved = {each: self._moved.best_within(each, best.get(each)) for each in budgets}
            best = {budget: found for budget, found in moved.items() if found is not None}
        return dict(sorted(best.items()))

    def frontier(self, strategy: str) -> list[tuple[int, Candidate]]:
        """Budgets and the best candidate of each: budgets grow, times fall."""
        low = self.min_peak(strategy).peak_bytes
        high = max(low, self.captured.baseline.peak_bytes)
        number = _FRONTIER_SOLVES if strategy == "checkmate" else FRONTIER_POINTS

        def candidate_within(budget_bytes: int) -> Candidate | None:
            found = self.best_within(budget_bytes, strategy)
            return None if found is None else found.candidate

        return frontier_at(linspace_int(low, high, number), candidate_within)

    # --- bounds and minima ---

    def bound_of(self, budget_bytes: int) -> Callable[[int], float]:
        """The time that no plan in the forms of this budget beats within a budget.

        It holds whatever the strategy, and is infinite where none can fit. With weights at home,
        whose plans have budgets of their own, it is always that of this budget.
        """

        def bound_ms(own_bytes: int) -> float:
            limit_bytes = own_bytes if self.weights is None else budget_bytes
            forms = (form for each in self.chunked for form in each.bounding(budget_bytes))
            bounds = (self._moved.bound_of(f) if self._moved else f.lower_bound for f in forms)
            least_ms = min(bound.bound_ms(limit_bytes) for bound in bounds)
            copy_ms = 0.0 if self.weights is None else self.weights.copy_ms(budget_bytes)
            return max(least_ms, copy_ms)

        return bound_ms

    def minimum(self, strategy: str) -> Candidate:
        """The schedule of the smallest peak that is the same at any times, without chunks."""
        smallest = self._resident_minimum(strategy)
        return smallest if self.weights is None else self.weights.least(self.captured, smallest)

    def _resident_minimum(self, strategy: str) -> Candidate:
        found = [form.search(strategy).minimum() for form in self._whole(strategy)]
        if self._moved is not None and strategy == DEFAULT:
            found.append(self._moved.minimum)
        return min(found, key=lambda candidate: candidate.peak_bytes)

    def min_peak(self, strategy: str) -> Candidate:
        """The schedule of the smallest peak of all forms."""
        if self.weights is not None:
            return self.weights.least(*self._least_found(strategy))
        return self._least_resident(strategy)

    def _least_found(self, strategy: str) -> Found:
        """The schedule of the smallest peak with all weights in memory, and its form."""
        least_bytes = self._least_resident(strategy).peak_bytes
        found = self._resident_within(least_bytes, strategy)
        return found or Found(self.captured, self._resident_minimum(strategy))

    def _least_resident(self, strategy: str) -> Candidate:
        smallest = self._resident_minimum(strategy)
        if strategy in (DEFAULT, UNMOVED):
            for chunked in self.chunked:
                smallest = chunked.smallest(smallest)
        return smallest


def _expected_ms(start: Candidate, bound_ms: float, reduction: float) -> float:
    """The time that a search is expected to reach from a start."""
    return start.time_ms - reduction * (start.time_ms - bound_ms)
