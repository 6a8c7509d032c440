"""What a search did: the schedule that each of its stages ended with, and what it took.

A search for one budget is a sequence of stages, and each ends with an incumbent: the fastest
schedule so far that fits. The trace holds one step for each stage, so it tells which of them found
the plan, which gained nothing, and what they cost. `bench.search_stages` adds up the traces of many
plans.

The log of this module has a line for each stage that improves the incumbent, at level INFO, as
solvers of integer programs print them; the lines of the others are at level DEBUG.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from rockmate._util import progress_bar
from rockmate.budget import size_text
from rockmate.planning.candidate import Candidate

logger = logging.getLogger(__name__)

# Seconds after which a search is long enough for a bar.
_BAR_DELAY_S = 1.0
# The bar of the search that runs.
_bar: ContextVar[Any] = ContextVar("bar", default=None)


@contextmanager
def gap_bar(*, is_shown: bool) -> Iterator[None]:
    """Shows the schedules that a long search has tried, the best time and its gap, while inside."""
    with progress_bar(
        desc="planning", unit="schedule", disable=not is_shown, delay=_BAR_DELAY_S, leave=False
    ) as bar:
        token = _bar.set(bar)
        try:
            yield
        finally:
            _bar.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """One stage of a search.

    Attributes:
        source: name of the stage.
        time_ms: the incumbent's time after it.
        gap: distance to the lower bound after it, as a fraction of the baseline's time. Infinite
            while there is no bound.
        gain: the baseline times that the stage took off the incumbent's time. None for the first
            stage, which has no incumbent to improve.
        seconds: wall time of the stage.
        elapsed_s: wall time from the beginning of the search to the end of the stage.
    """

    source: str
    time_ms: float
    gap: float
    gain: float | None
    seconds: float
    elapsed_s: float


@dataclass
class SearchTrace:
    """The stages of the search for one budget, in order.

    Attributes:
        budget_bytes: the budget.
        baseline_ms: time without recomputation, the unit of gaps and gains.
        bound_ms: the lower bound of the budget.
        steps: one for each stage.
    """

    budget_bytes: int
    baseline_ms: float
    bound_ms: float
    steps: list[TraceStep] = field(default_factory=list)
    _begin: float = field(default_factory=monotonic)

    def note(self, source: str, found: Candidate) -> None:
        """Adds a stage that has just ended with this schedule, which fits the budget."""
        last = self.steps[-1] if self.steps else None
        time_ms = min(found.time_ms, last.time_ms) if last else found.time_ms
        elapsed_s = monotonic() - self._begin
        step = TraceStep(
            source=source,
            time_ms=time_ms,
            gap=(time_ms - self.bound_ms) / self.baseline_ms,
            gain=(last.time_ms - time_ms) / self.baseline_ms if last else None,
            seconds=elapsed_s - (last.elapsed_s if last else 0.0),
            elapsed_s=elapsed_s,
        )
        self.steps.append(step)
        if (bar := _bar.get()) is not None:
            ratio = time_ms / self.baseline_ms
            bar.set_postfix_str(f"{ratio:.4f}x, gap {step.gap:.2%}", refresh=False)
            bar.update()
        is_better = last is None or time_ms < last.time_ms
        logger.log(
            logging.INFO if is_better else logging.DEBUG,
            "budget %s, %6.2f s: %.4fx, gap %.3f %%, %s",
            size_text(self.budget_bytes),
            elapsed_s,
            time_ms / self.baseline_ms,
            100 * step.gap,
            source,
        )
