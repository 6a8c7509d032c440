"""The captured step and its chunked forms: which of them runs fastest within a budget.

Each variant is a captured step of its own (`CapturedStep.in_chunks`). It is measured and planned
like any other, on demand. Few are, because a chunking is skipped if

* one chunk of its largest value exceeds the budget,
* the lower bound or the baseline time of its variant is no shorter than the incumbent, or
* a larger chunk size already failed for its time. Smaller chunks take no less time and no more
  memory, as a rule.

The same arithmetic in chunks is no faster: where ops are measured so, that is noise. So a step in
chunks counts as at least `_MIN_OVERHEAD` slower than the whole one. Chunks are then chosen only for
recomputations that they save, by more than the noise, and never where the whole step has room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf

from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.protocol import Bounds, MinBound, StoredBound
from rockmate.bound.solver_time import SolverTime
from rockmate.capture.options import Numerics
from rockmate.costs.cost import Costs, scaled_times
from rockmate.costs.layout_check import captured_in_kernel_layouts
from rockmate.graph.chunking.chunks import Chunks
from rockmate.graph.chunking.region import Refusal
from rockmate.graph.ir import Graph
from rockmate.graph.step_options import StepOptions
from rockmate.planning.baseline_search import FRONTIER_POINTS
from rockmate.planning.block_options import SolvedBlocks
from rockmate.planning.candidate import Candidate, by_time, fastest, frontier_at, linspace_int
from rockmate.planning.chunk_notes import VariantNotes
from rockmate.planning.chunkable_blocks import ChunkableBlocks
from rockmate.planning.stopping_rule import StoppingRule
from rockmate.planning.variant import CHUNKING_STRATEGY, Variant
from rockmate.step import CapturedStep

# Share of an initial schedule's gap to the lower bound that the rest of the search may close.
_EXPECTED_GAP_REDUCTION = 0.35
# The same for a quick start, which is further from what the search ends with.
_QUICK_GAP_REDUCTION = 0.6
# Share by which equal sums of times may differ.
_ROUNDING = 1e-9
# Least time that chunks add, as a share of the baseline's time. On one core, baselines of the same
# step in 2, 4 and 8 chunks differ by up to 0.02 from run to run.
_MIN_OVERHEAD = 0.01


class Variants:
    """The captured step and its chunked forms.

    Args:
        step: as captured.
        costs_of: measures or estimates the costs of a graph.
        numerics: as for `Planner`.
        rule: when a search ends. Its time limit is also that of all solves together, those of
            every variant included; see `SolverTime`.

    Attributes:
        unchunked: the step as captured.
        chunkable: its blocks that may run in chunks.
    """

    def __init__(
        self,
        step: CapturedStep,
        costs_of: Callable[[Graph], Costs],
        *,
        numerics: Numerics,
        rule: StoppingRule,
    ) -> None:
        self._costs_of = costs_of
        self._rule = rule
        self._numerics = numerics
        self._solver_time = SolverTime(rule.time_limit_s)
        self._solved = SolvedBlocks()
        self._chunked: dict[Chunks, Variant | None] = {}
        self.unchunked = self._new_variant(step)
        self.chunkable = ChunkableBlocks(
            step, self.unchunked.baseline.peak_bytes, numerics=numerics
        )

    def _new_variant(self, step: CapturedStep) -> Variant:
        return Variant(
            step, self._costs_of(step.graph), self._solver_time, self._solved, self._rule
        )

    def _variant(self, chunking: Chunks) -> Variant | None:
        """The step in these chunks; None if it cannot run so."""
        if chunking not in self._chunked:
            self._chunked[chunking] = captured_in_kernel_layouts(
                lambda: self._new_chunked(chunking)
            )
        return self._chunked[chunking]

    def _new_chunked(self, chunking: Chunks) -> Variant | None:
        """The variant of a step in chunks, slowed down to the least time that chunks take."""
        step = self.unchunked.step.in_chunks(chunking)
        if isinstance(step, Refusal):
            return None
        variant = self._new_variant(step)
        own_ms = variant.baseline.time_ms
        if own_ms >= self._least_chunked_ms:
            return variant
        costs = scaled_times(variant.costs, self._least_chunked_ms / own_ms)
        return Variant(step, costs, self._solver_time, self._solved, self._rule)

    @property
    def _least_chunked_ms(self) -> float:
        """The least time of any schedule in chunks."""
        return (1 + _MIN_OVERHEAD) * self.unchunked.baseline.time_ms

    def _may_pay(self, whole_ms: float, budget_bytes: int) -> bool:
        """Whether a schedule in chunks may be faster than one of the whole step."""
        return whole_ms > self._least_chunked_ms and self._considers_chunks(budget_bytes)

    def _considers_chunks(self, budget_bytes: int) -> bool:
        """Whether a plan for this budget may run in chunks."""
        if budget_bytes < self.unchunked.local_search.minimum().peak_bytes:
            return bool(self.chunkable.chunkings)
        return self.chunkable.may_help(budget_bytes)

    def step_for(self, options: StepOptions) -> CapturedStep:
        """The variant's step that was captured, and put in chunks, with these options."""
        chunked = (variant for variant in self._chunked.values() if variant is not None)
        for variant in (self.unchunked, *chunked):
            if variant.step.options == options:
                return variant.step
        step = self.unchunked.step
        if options.kernels == "fused":  # as another rank has them
            step = step.fused(unfused=options.unfused)
        return step.with_chunks_of(options)

    def notes(self, variant: Variant, budget_bytes: int) -> VariantNotes:
        """How the chunkable blocks run in a variant, and how long the step takes without chunks."""
        chunks = variant.step.options.loss_chunks
        whole = self.unchunked.local_search
        return VariantNotes(self.chunkable, chunks, whole.best_within, budget_bytes)

    # --- the fastest schedule ---

    def best_within(self, budget_bytes: int, strategy: str) -> tuple[Variant, Candidate] | None:
        """The fastest schedule found within the budget, and its variant; None if none fits."""
        initial = self.unchunked.local_search.initial_within
        is_whole = strategy != CHUNKING_STRATEGY
        if is_whole or not self._may_pay(_ms(initial(budget_bytes)), budget_bytes):
            found = self.unchunked.search(strategy).best_within(budget_bytes)
            return None if found is None else (self.unchunked, found)
        best: tuple[Variant, Candidate] | None = None
        best_ms = inf
        starts = self._initial_candidates(budget_bytes)
        for variant, quick in sorted(starts, key=lambda pair: by_time(pair[1])):
            bound_ms = variant.lower_bound.bound_ms(budget_bytes)
            if _expected_ms(quick, bound_ms, _QUICK_GAP_REDUCTION) >= best_ms:
                continue
            # The quick start may fit where the search's own smallest peak does not.
            start = fastest(quick, variant.local_search.initial_within(budget_bytes))
            if _expected_ms(start, bound_ms, _EXPECTED_GAP_REDUCTION) >= best_ms:
                continue
            found = fastest(start, variant.local_search.best_within(budget_bytes))
            if found.time_ms < best_ms:
                best, best_ms = (variant, found), found.time_ms
        return best

    def best_within_each(
        self, budgets: Sequence[int], *, progress: bool = False
    ) -> dict[int, tuple[Variant, Candidate]]:
        """The schedules of the default strategy for many budgets, planned together.

        Budgets that no schedule fits are left out.
        """
        whole = self.unchunked.local_search.best_within_each(budgets, progress=progress)
        best = {budget: (self.unchunked, candidate) for budget, candidate in whole.items()}
        slow = [budget for budget in budgets if self._may_pay(_ms(whole.get(budget)), budget)]
        for form in self.chunkable.chunkings if slow else ():
            self._improve_in_chunks(best, slow, form, progress=progress)
        return best

    def _improve_in_chunks(
        self,
        best: dict[int, tuple[Variant, Candidate]],
        budgets: Sequence[int],
        form: Sequence[Chunks],
        *,
        progress: bool,
    ) -> None:
        """Takes the schedules of one form where they are faster, until smaller chunks gain nothing.

        Args:
            best: the fastest schedules so far, by budget.
            budgets: those that chunks may pay for.
            form: its chunkings.
            progress: shows a progress bar.
        """
        for chunking in form:
            variant = self._variant(chunking)
            if variant is None or self._rule.is_late:
                continue
            open_budgets = [
                budget
                for budget in budgets
                if self.chunkable.chunk_bytes(chunking) <= budget
                and self._is_promising(variant, budget, _ms_of(best.get(budget)))
            ]
            found = variant.local_search.best_within_each(open_budgets, progress=progress)
            faster = {
                budget: (variant, candidate)
                for budget, candidate in found.items()
                if candidate.time_ms < _ms_of(best.get(budget))
            }
            if found and not faster:
                break
            best |= faster

    def _is_promising(self, variant: Variant, budget_bytes: int, incumbent_ms: float) -> bool:
        """Whether a variant may be faster than the incumbent by more than the gap tolerance."""
        gap_ms = incumbent_ms - variant.lower_bound.bound_ms(budget_bytes)
        return gap_ms > self._rule.gap_tolerance * self.unchunked.baseline.time_ms

    def _initial_candidates(self, budget_bytes: int) -> list[tuple[Variant, Candidate]]:
        """The initial schedules of all variants that can still become the fastest."""
        initial = self.unchunked.local_search.initial_within(budget_bytes)
        found = [] if initial is None else [(self.unchunked, initial)]
        for form in self.chunkable.chunkings:
            if found and self._rule.is_late:
                break
            incumbent_ms = min((candidate.time_ms for _, candidate in found), default=inf)
            found += self._initial_candidates_of(form, budget_bytes, incumbent_ms)
        return found

    def _initial_candidates_of(
        self, form: Sequence[Chunks], budget_bytes: int, incumbent_ms: float
    ) -> Iterator[tuple[Variant, Candidate]]:
        """The initial schedules of one form, until smaller chunks promise nothing."""
        last_ms = inf
        ruled_out: LowerBound | None = None
        for chunking in self._without_dominated(form):
            if self.chunkable.chunk_bytes(chunking) > budget_bytes:
                continue
            if incumbent_ms < inf and self._rule.is_late:
                return
            variant = self._variant(chunking)
            if variant is None:
                continue
            if variant.baseline.time_ms >= incumbent_ms:
                return
            if not self._is_promising(variant, budget_bytes, incumbent_ms):
                if ruled_out is not None and not _promises_more(
                    variant.lower_bound, ruled_out, budget_bytes
                ):
                    return
                ruled_out = variant.lower_bound
                continue
            initial = variant.quick_start(budget_bytes)
            if initial is None and incumbent_ms == inf:
                initial = variant.local_search.initial_within(budget_bytes)
            if initial is None:
                continue
            yield variant, initial
            if initial.time_ms >= last_ms:
                return
            last_ms = initial.time_ms
            incumbent_ms = min(incumbent_ms, last_ms)

    def _without_dominated(self, form: Sequence[Chunks]) -> Sequence[Chunks]:
        """The chunkings of a form without those that a smaller chunk size dominates.

        Where nothing is recomputed, the step may take the least time that chunks count, whatever
        their number. The smallest of these chunks then take no more memory than larger ones.
        """
        if any(chunking.form != "at_once" for chunking in form):
            return form
        for index in reversed(range(len(form))):
            variant = self._variant(form[index])
            if variant is not None and self._is_fastest_in_chunks(variant):
                return form[index:]
        return form

    def _is_fastest_in_chunks(self, variant: Variant) -> bool:
        """Whether a variant takes the least time that chunks count."""
        return variant.baseline.time_ms <= self._least_chunked_ms * (1 + _ROUNDING)

    def frontier(self, strategy: str) -> list[tuple[int, Candidate]]:
        """Budgets and the best candidate of each: budgets grow, times fall."""
        if strategy != CHUNKING_STRATEGY:
            return self.unchunked.search(strategy).frontier()
        low, high = self.min_peak(strategy).peak_bytes, self.unchunked.baseline.peak_bytes

        def candidate_within(budget_bytes: int) -> Candidate | None:
            best = self.best_within(budget_bytes, strategy)
            return None if best is None else best[1]

        return frontier_at(linspace_int(low, high, FRONTIER_POINTS), candidate_within)

    # --- bounds and minima ---

    def bounds_within(self, budget_bytes: int) -> Bounds:
        """Lower bounds that hold for every plan of this budget, whatever the strategy.

        Where plans may be in chunks, the least over the step as captured and all its chunkings.
        """
        if self._numerics == "bitwise":
            return self.unchunked.lower_bound
        return MinBound(partial(self._lower_bounds, budget_bytes))

    def _lower_bounds(self, budget_bytes: int) -> Iterator[Bounds]:
        """The bound of the step as captured and of each chunking whose chunk fits the budget."""
        whole = self.unchunked.lower_bound
        yield whole
        forms = self.chunkable.chunkings if self._considers_chunks(budget_bytes) else ()
        if forms and whole.bound_ms(budget_bytes) <= self._least_chunked_ms:
            yield StoredBound(self._least_chunked_ms)
            return
        for chunking in (chunking for form in forms for chunking in form):
            if self.chunkable.chunk_bytes(chunking) <= budget_bytes:
                variant = self._variant(chunking)
                if variant is not None:
                    yield variant.lower_bound

    def minimum(self, strategy: str) -> Candidate:
        """The schedule of the smallest peak without chunks."""
        return self.unchunked.search(strategy).minimum()

    def min_peak(self, strategy: str) -> Candidate:
        """The schedule of the smallest peak, in chunks if that is smaller."""
        best = self.unchunked.search(strategy).minimum()
        if strategy != CHUNKING_STRATEGY:
            return best
        for form in self.chunkable.chunkings:
            for chunking in reversed(form):
                if self.chunkable.chunk_bytes(chunking) >= best.peak_bytes:
                    continue
                variant = self._variant(chunking)
                if variant is None:
                    continue
                if variant.lower_bound.peak_bound_bytes >= best.peak_bytes:
                    break
                smallest = variant.search(strategy).minimum()
                best = min(best, smallest, key=lambda candidate: candidate.peak_bytes)
        return best


def _ms(candidate: Candidate | None) -> float:
    return inf if candidate is None else candidate.time_ms


def _ms_of(pair: tuple[Variant, Candidate] | None) -> float:
    return inf if pair is None else pair[1].time_ms


def _expected_ms(start: Candidate, bound_ms: float, reduction: float) -> float:
    """The time that a search is expected to reach from a start."""
    return start.time_ms - reduction * (start.time_ms - bound_ms)


def _promises_more(smaller: LowerBound, larger: LowerBound, budget_bytes: int) -> bool:
    """Whether smaller chunks lower time bound or peak bound; else smaller ones seldom do."""
    return (
        smaller.bound_ms(budget_bytes) < larger.bound_ms(budget_bytes)
        or smaller.peak_bound_bytes < larger.peak_bound_bytes
    )
