"""What a sweep is asked for and what it returns: options, rows, plans, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rockmate.budget import Budget
from rockmate.errors import RockmateError
from rockmate.plan.plan import Plan
from rockmate.sweeps.row import SweepRow, compared
from rockmate.sweeps.store import Key


class SweepError(RockmateError, ValueError):
    """A sweep cannot run as asked; the text says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What to sweep over.

    Attributes:
        budgets: in any order, or as text (see `rockmate.budget.parse_budgets`). None takes every
            tenth of the baseline peak down to the smallest feasible one without chunks, and that.
        strategies: names out of `rockmate.STRATEGIES`.
        adds_bitwise: whether "bitwise" joins them where plans of the others are in chunks.
        measure: train a few steps at each budget.
        num_steps: how many of those are timed and compared with eager's.
        progress: show progress bars on standard error.
    """

    budgets: Sequence[Budget] | str | None = None
    strategies: Sequence[str] = ("rockmate",)
    adds_bitwise: bool = False
    measure: bool = False
    num_steps: int = 5
    progress: bool = False


@dataclass(kw_only=True, eq=False)
class Sweep:
    """What a sweep has found so far.

    Attributes:
        title: the model and its sample.
        settings: what the rows hold for: fingerprints of the captured step, options, device,
            threads, versions.
        baseline: the plan that recomputes nothing.
        timings: seconds by stage.
        rows: by strategy and budget.
        plans: of the feasible rows.
        is_complete: whether every row that was asked for is there.
    """

    title: str
    settings: dict[str, Any]
    baseline: Plan
    timings: dict[str, float]
    rows: list[SweepRow] = field(default_factory=list)
    plans: dict[Key, Plan] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def strategies(self) -> tuple[str, ...]:
        """Those that have rows."""
        return tuple(dict.fromkeys(row.strategy for row in self.rows))

    @property
    def recommended(self) -> list[SweepRow]:
        """The rows at knees of their curve."""
        return [row for row in self.rows if row.is_recommended]

    @property
    def broken_promises(self) -> list[str]:
        """What was promised and did not hold, a line each."""
        return [
            f"{row.strategy} at {row.budget_bytes:,} bytes: {row.broken_promise}"
            for row in self.rows
            if row.broken_promise
        ]

    def put(self, row: SweepRow) -> None:
        """Adds a row, in place of one of the same strategy and budget."""
        self.rows = compared([*(old for old in self.rows if old.key != row.key), row])
