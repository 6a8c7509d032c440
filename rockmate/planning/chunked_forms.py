"""A form of a step in chunks: which numbers and kinds of chunks are worth planning.

Each is a captured step of its own (`CapturedStep.in_chunks`). It is measured and planned like any
other, on demand. Few are, because a chunking is skipped if

* one chunk of its largest value exceeds the budget,
* its lower bound or its baseline's time is no shorter than the incumbent, or
* a larger chunk size already failed for its time. Smaller chunks take no less time and no more
  memory, as a rule.

The same arithmetic in chunks is no faster: where ops are measured so, that is noise. So a step in
chunks counts as at least `_MIN_OVERHEAD` slower than the whole one. Chunks are then chosen only for
recomputations that they save, by more than the noise, and never where the whole step has room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from rockmate.bound.lower_bound import LowerBound
from rockmate.capture.options import Numerics
from rockmate.costs.cost import scaled_times
from rockmate.costs.layout_check import captured_in_kernel_layouts
from rockmate.graph.chunking.chunks import Chunks
from rockmate.graph.chunking.region import Refusal
from rockmate.planning.candidate import Candidate
from rockmate.planning.chunkable_blocks import ChunkableBlocks
from rockmate.planning.form import Form, Found, time_of
from rockmate.planning.search_problem import StoppingRule
from rockmate.planning.step import CapturedStep

# Share by which equal sums of times may differ.
_ROUNDING = 1e-9
# Least time that chunks add, as a share of the baseline's time. On one core, baselines of the same
# step in 2, 4 and 8 chunks differ by up to 0.02 from run to run.
_MIN_OVERHEAD = 0.01

Line = tuple[Chunks, ...]
"""Chunkings of one kind, with falling chunk sizes."""


class ChunkedForms:
    """A form without chunks, and its forms in chunks, each made on demand.

    Args:
        whole: the form without chunks.
        form_of: finds the costs of a step.
        numerics: as for `Planner`.
        rule: when searches end.

    Attributes:
        whole: as given.
        blocks: its blocks that may run in chunks.
        known: the forms in chunks that were made; None for chunks that cannot be.
    """

    def __init__(
        self,
        whole: Form,
        form_of: Callable[[CapturedStep], Form],
        *,
        numerics: Numerics,
        rule: StoppingRule,
    ) -> None:
        self.whole = whole
        self.blocks = ChunkableBlocks(whole.step, whole.baseline.peak_bytes, numerics=numerics)
        self.known: dict[Chunks, Form | None] = {}
        self._form_of, self._rule = form_of, rule

    def form(self, chunking: Chunks) -> Form | None:
        """The step in these chunks; None if it cannot run so."""
        if chunking not in self.known:
            self.known[chunking] = captured_in_kernel_layouts(lambda: self._new_form(chunking))
        return self.known[chunking]

    def _new_form(self, chunking: Chunks) -> Form | None:
        """The form in chunks, slowed down to the least time that chunks take."""
        step = self.whole.step.in_chunks(chunking)
        if isinstance(step, Refusal):
            return None
        form = self._form_of(step)
        own_ms = form.baseline.time_ms
        if own_ms >= self.least_ms:
            return form
        return Form(step, scaled_times(form.costs, self.least_ms / own_ms), self._rule)

    @property
    def least_ms(self) -> float:
        """The least time of any schedule in chunks."""
        return (1 + _MIN_OVERHEAD) * self.whole.baseline.time_ms

    # --- which chunks ---

    def lines(self, budget_bytes: int, whole_ms: float) -> Sequence[Line]:
        """The chunkings that may be faster, by kind.

        Args:
            budget_bytes: the budget.
            whole_ms: time of a schedule without chunks; infinite if none fits.
        """
        return self._considered(budget_bytes) if whole_ms > self.least_ms else ()

    def _considered(self, budget_bytes: int) -> Sequence[Line]:
        """The chunkings that a plan for this budget may have."""
        is_whole_feasible = budget_bytes >= self.whole.local_search.minimum().peak_bytes
        if is_whole_feasible and not self.blocks.may_help(budget_bytes):
            return ()
        return self.blocks.chunkings

    def _is_promising(self, form: Form, budget_bytes: int, incumbent_ms: float) -> bool:
        """Whether a form may be faster than the incumbent by more than the gap tolerance."""
        gap_ms = incumbent_ms - form.lower_bound.bound_ms(budget_bytes)
        return gap_ms > self._rule.gap_tolerance * self.whole.baseline.time_ms

    # --- schedules ---

    def starts(self, budget_bytes: int, incumbent_ms: float) -> Iterator[Found]:
        """The initial schedules of all forms that may become the fastest, the whole one's first.

        Args:
            budget_bytes: the budget.
            incumbent_ms: time of the fastest schedule so far; infinite if there is none.
        """
        initial = self.whole.local_search.initial_within(budget_bytes)
        if initial is not None:
            yield Found(self.whole, initial)
            incumbent_ms = min(incumbent_ms, initial.time_ms)
        for line in self.lines(budget_bytes, time_of(initial)):
            if incumbent_ms < inf and self._rule.is_late:
                return
            for found in self._starts_of(line, budget_bytes, incumbent_ms):
                yield found
                incumbent_ms = min(incumbent_ms, found.time_ms)

    def _starts_of(self, line: Line, budget_bytes: int, incumbent_ms: float) -> Iterator[Found]:
        """The initial schedules of one kind of chunks, until smaller ones promise nothing."""
        last_ms = inf
        ruled_out: LowerBound | None = None
        for chunking in self._without_dominated(line):
            if incumbent_ms < inf and self._rule.is_late:
                return
            if self.blocks.chunk_bytes(chunking) > budget_bytes:
                continue
            form = self.form(chunking)
            if form is None:
                continue
            if form.baseline.time_ms >= incumbent_ms:
                return
            if not self._is_promising(form, budget_bytes, incumbent_ms):
                bound = form.lower_bound
                if (
                    ruled_out is not None  # smaller chunks seldom do better then
                    and bound.bound_ms(budget_bytes) >= ruled_out.bound_ms(budget_bytes)
                    and bound.peak_bound_bytes >= ruled_out.peak_bound_bytes
                ):
                    return
                ruled_out = bound
                continue
            initial = form.quick_start(budget_bytes)
            if initial is None and incumbent_ms == inf:
                initial = form.local_search.initial_within(budget_bytes)
            if initial is None:
                continue
            yield Found(form, initial)
            if initial.time_ms >= last_ms:
                return
            last_ms = initial.time_ms
            incumbent_ms = min(incumbent_ms, last_ms)

    def _without_dominated(self, line: Line) -> Line:
        """The chunkings of a line without those that a smaller chunk size dominates.

        Where nothing is recomputed, the step may take the least time that chunks count, whatever
        their number. The smallest of these chunks then take no more memory than larger ones.
        """
        if any(chunking.form != "at_once" for chunking in line):
            return line
        for index in reversed(range(len(line))):
            form = self.form(line[index])
            if form is not None and form.baseline.time_ms <= self.least_ms * (1 + _ROUNDING):
                return line[index:]
        return line

    def improve(
        self, best: dict[int, Found], budgets: Sequence[int], *, progress: bool = False
    ) -> None:
        """Takes schedules of these forms where they are faster, for many budgets together.

        Args:
            best: the fastest schedules so far, by budget.
            budgets: all budgets.
            progress: shows a progress bar.
        """
        whole = self.whole.local_search.best_within_each(budgets, progress=progress)
        _take_faster(best, self.whole, whole)
        lines: dict[Line, list[int]] = {}
        for budget in budgets:
            for line in self.lines(budget, time_of(whole.get(budget))):
                lines.setdefault(line, []).append(budget)
        for line, slow in lines.items():
            self._improve_in_chunks(best, slow, line, progress=progress)

    def _improve_in_chunks(
        self, best: dict[int, Found], budgets: Sequence[int], line: Line, *, progress: bool
    ) -> None:
        """The same with one kind of chunks, until smaller ones gain nothing."""
        for chunking in line:
            form = self.form(chunking)
            if form is None or self._rule.is_late:
                continue
            open_budgets = [
                budget
                for budget in budgets
                if self.blocks.chunk_bytes(chunking) <= budget
                and self._is_promising(form, budget, time_of(best.get(budget)))
            ]
            found = form.local_search.best_within_each(open_budgets, progress=progress)
            if not _take_faster(best, form, found) and found:
                break

    def smallest(self, best: Candidate) -> Candidate:
        """The schedule of the smallest peak, in chunks if that is smaller than a known one."""
        for line in self.blocks.chunkings:
            for chunking in reversed(line):
                if self.blocks.chunk_bytes(chunking) >= best.peak_bytes:
                    continue
                form = self.form(chunking)
                if form is None:
                    continue
                if form.lower_bound.peak_bound_bytes >= best.peak_bytes:
                    break
                smallest = form.local_search.minimum()
                best = min(best, smallest, key=lambda candidate: candidate.peak_bytes)
        return best

    def bounding(self, budget_bytes: int) -> Iterator[Form]:
        """The forms one of which has the least bound: the whole one, and those in chunks."""
        yield self.whole
        if self.whole.lower_bound.bound_ms(budget_bytes) > self.least_ms:
            yield from self.forms_within(budget_bytes)

    def forms_within(self, budget_bytes: int) -> Iterator[Form]:
        """The forms in chunks that a plan for this budget may have."""
        for chunking in (chunking for line in self._considered(budget_bytes) for chunking in line):
            if self.blocks.chunk_bytes(chunking) <= budget_bytes:
                form = self.form(chunking)
                if form is not None:
                    yield form


def _take_faster(best: dict[int, Found], form: Form, found: dict[int, Candidate]) -> bool:
    """Takes the schedules of a form that are faster; whether there are any."""
    faster = {
        budget: Found(form, candidate)
        for budget, candidate in found.items()
        if candidate.time_ms < time_of(best.get(budget))
    }
    best |= faster
    return bool(faster)
