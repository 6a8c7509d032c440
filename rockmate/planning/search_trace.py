"""The log of a search: the schedule that each of its stages ended with, and when.

A search for one budget is a sequence of stages, and each ends with an incumbent: the fastest
schedule so far that fits. A stage that improves the incumbent is a line at level INFO, as solvers
of integer programs print them; the lines of the others are at level DEBUG.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
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


@dataclass
class SearchTrace:
    """The log of the search for one budget.

    Attributes:
        budget_bytes: the budget.
        baseline_ms: time without recomputation, the unit of gaps.
        bound_ms: the lower bound of the budget.
        time_ms: the incumbent's time after the last stage.
    """

    budget_bytes: int
    baseline_ms: float
    bound_ms: float
    time_ms: float = inf
    _begin: float = field(default_factory=monotonic)

    def note(self, source: str, found: Candidate) -> None:
        """Logs a stage that has just ended with this schedule, which fits the budget."""
        is_better = found.time_ms < self.time_ms
        self.time_ms = min(found.time_ms, self.time_ms)
        ratio, gap = self.time_ms / self.baseline_ms, self.time_ms - self.bound_ms
        if (bar := _bar.get()) is not None:
            bar.set_postfix_str(f"{ratio:.4f}x, gap {gap / self.baseline_ms:.2%}", refresh=False)
            bar.update()
        logger.log(
            logging.INFO if is_better else logging.DEBUG,
            "budget %s, %6.2f s: %.4fx, gap %.3f %%, %s",
            size_text(self.budget_bytes),
            monotonic() - self._begin,
            ratio,
            100 * gap / self.baseline_ms,
            source,
        )
