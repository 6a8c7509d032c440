"""What a sweep found: a row for each budget and strategy, with plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rockmate.budget import size_text
from rockmate.curves.curve import Curve
from rockmate.curves.errors import SweepError
from rockmate.curves.picture import sweep_figure
from rockmate.curves.sweep_row import SweepRow, compared
from rockmate.curves.table import Column, number, short_number, sized
from rockmate.plan.plan import Plan
from rockmate.planning.curve_choice import SLOWDOWN, knee, least_within

Key = tuple[str, int]
"""Strategy and budget of a row."""


@dataclass(kw_only=True, eq=False)
class Sweep(Curve[SweepRow]):
    """The rows of a sweep, by strategy and ascending budget.

    `print` shows a table, and a notebook the table and the picture. It is a sequence of its rows:
    `pandas.DataFrame(sweep)` makes a data frame.

    Attributes:
        title: the model and its sample.
        settings: what the rows hold for: fingerprints of the captured step, options, device,
            threads, versions.
        baseline: the plan that recomputes nothing.
        timings: seconds by stage.
        rows: by strategy and budget.
        plans: of the feasible rows, by strategy and budget.
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
    def feasible(self) -> list[SweepRow]:
        """The rows that have a plan."""
        return [row for row in self.rows if row.is_feasible]

    @property
    def recommended(self) -> SweepRow | None:
        """The row to begin with: the knee, else the smallest peak within 1.05x of the time."""
        return next((row for row in self.rows if row.is_recommended), None)

    @property
    def knee(self) -> SweepRow | None:
        """The row at the bend of the first strategy's curve.

        Below it less memory costs more time. None where time grows evenly as memory shrinks.
        """
        place = knee([row.point for row in self._first])
        return None if place is None else self._first[place]

    @property
    def _first(self) -> list[SweepRow]:
        return [row for row in self.feasible if row.strategy == self.strategies[0]]

    def best(self, *, max_slowdown: float = 1.05) -> SweepRow:
        """The row of the smallest predicted peak whose step is fast enough.

        Args:
            max_slowdown: most of its predicted time over the time with nothing recomputed.

        Raises:
            SweepError: no row is as fast.
        """
        place = least_within([row.point for row in self.feasible], max_slowdown)
        if place is not None:
            return self.feasible[place]
        least = min((row.point[1] for row in self.feasible), default=None)
        fastest = "no budget has a plan" if least is None else f"the fastest takes {least:.3f}x"
        raise SweepError(
            f"no row is within {max_slowdown}x of the time with nothing recomputed: {fastest}. "
            "Allow more, or sweep over larger budgets."
        )

    @property
    def broken_promises(self) -> list[str]:
        """What was promised and did not hold, a line each."""
        return [
            f"{row.strategy} at {row.budget_bytes:,} bytes: {row.broken_promise}"
            for row in self.rows
            if row.broken_promise
        ]

    def put(self, row: SweepRow, plan: Plan | None = None) -> None:
        """Adds a row and its plan, in place of one of the same strategy and budget."""
        self.rows = compared([*(old for old in self.rows if old.key != row.key), row])
        if plan is not None:
            self.plans[row.key] = plan

    def recommendation(self, row: SweepRow) -> str:
        """A budget in words, with the reason for it."""
        smaller = [each for each in self._first if each.budget_bytes < row.budget_bytes]
        cost = smaller[-1].extra_ms_per_tenth if smaller else None
        reason = "the smallest"
        if row == self.knee and cost is not None:
            reason = f"below it, each tenth less costs {short_number(cost)} ms a step"
        elif smaller:
            reason = f"the smallest within {SLOWDOWN}x, since the curve has no knee"
        return (
            f"{size_text(row.budget_bytes)}, {row.budget_share:.2f} of the peak with nothing "
            f"recomputed: {row.predicted_ratio:.3f}x the time; {reason}"
        )

    # --- as a table, JSON and a picture ---

    def heading(self) -> str:
        """See `Curve`."""
        return (
            f"{self.title}\nnothing recomputed: {size_text(self.baseline.baseline_peak_bytes)}, "
            f"{short_number(self.baseline.baseline_ms)} ms a step ({self.seconds_text})"
        )

    def columns(self) -> list[Column]:
        """See `Curve`."""
        columns = [
            Column("strategy", lambda row: row.strategy),
            Column("budget", lambda row: size_text(row.budget_bytes)),
            Column("share", lambda row: f"{row.budget_share:.3f}", 3),
            Column("peak", lambda row: sized(row.predicted_peak_bytes), 5),
            Column("ms", lambda row: short_number(row.predicted_ms), 6),
            Column("time", lambda row: number(row.predicted_ratio, ".3f", "x")),
            Column("ms/tenth", lambda row: short_number(row.extra_ms_per_tenth), 7),
        ]
        if any(row.loss_chunks for row in self.rows):
            columns.append(Column("chunks", lambda row: row.loss_chunks, 4))
        if any(row.moved_bytes for row in self.rows):
            columns.append(Column("moved", lambda row: sized(row.moved_bytes), 5))
        if any(row.is_measured for row in self.rows):
            columns += [
                Column("measured peak", lambda row: sized(row.measured_peak_bytes), 4),
                Column("measured ms", lambda row: short_number(row.measured_ms), 8),
                Column("measured", lambda row: number(row.measured_ratio, ".3f", "x"), 1),
                Column("gradients", _gradients, 2),
            ]
        return columns if len(self.strategies) > 1 else columns[1:]

    def note(self, row: SweepRow) -> str:
        """See `Curve`."""
        if row.broken_promise:
            return "FAILED"
        if row.is_feasible:
            return "<- recommended" if row.is_recommended else "stopped" if row.problem else ""
        return "no plan" if row.minimum_bytes is None else f"needs {size_text(row.minimum_bytes)}"

    def remarks(self) -> str:
        """See `Curve`."""
        row = self.recommended
        lines = [] if row is None else [f"Recommended: {self.recommendation(row)}."]
        return "\n".join([*lines, *(f"FAILED: {line}" for line in self.broken_promises)])

    def facts(self) -> dict[str, Any]:
        """See `Curve`."""
        return {**self.settings, "title": self.title, "is_complete": self.is_complete}

    def figure(self) -> Any:
        """See `Curve`."""
        peak_bytes = self.baseline.baseline_peak_bytes
        return sweep_figure(self.rows, baseline_peak_bytes=peak_bytes)


def _gradients(row: SweepRow) -> str:
    if row.gradient_difference is None:
        return "not compared" if row.is_measured else ""
    return "bitwise" if row.gradient_difference == 0 else f"{row.gradient_difference:.0e}"
