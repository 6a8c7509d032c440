"""What a sweep found: a row for each budget and strategy, with plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rockmate.budget import size_text
from rockmate.curves.curve import Curve
from rockmate.curves.errors import SweepError
from rockmate.curves.knees import knees
from rockmate.curves.picture import sweep_figure
from rockmate.curves.sweep_row import SweepRow, compared
from rockmate.curves.table import Column, number, sized
from rockmate.plan.plan import Plan

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
    def recommended(self) -> list[SweepRow]:
        """The rows at knees of their curve."""
        return [row for row in self.rows if row.is_recommended]

    @property
    def knee(self) -> SweepRow | None:
        """The row at the sharpest bend of the first strategy's curve.

        Below it less memory costs more time. None where time grows evenly as memory shrinks.
        """
        rows = [row for row in self.feasible if row.strategy == self.strategies[0]]
        return next((rows[knee] for knee in knees([row.point for row in rows], max_num=1)), None)

    def best(self, *, max_slowdown: float = 1.05) -> SweepRow:
        """The row of the smallest predicted peak whose step is fast enough.

        Args:
            max_slowdown: most of its predicted time over the time with nothing recomputed.

        Raises:
            SweepError: no row is as fast.
        """
        fast = [row for row in self.feasible if row.point[1] <= max_slowdown]
        if fast:
            return min(fast, key=lambda row: row.point)
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

    def cost_below(self, row: SweepRow) -> float | None:
        """Milliseconds that 100 MiB less cost from a row to the next smaller one of its strategy.

        None for the smallest row.
        """
        smaller = [
            other.extra_ms_per_100_mib
            for other in self.rows
            if other.strategy == row.strategy and other.budget_bytes < row.budget_bytes
        ]
        return smaller[-1] if smaller else None

    def recommendation(self, row: SweepRow) -> str:
        """A budget in words, and what less memory costs."""
        cost = self.cost_below(row)
        below = "" if cost is None else f"; below it, 100 MiB less cost {cost:,.1f} ms a step"
        return (
            f"{row.strategy}, {size_text(row.budget_bytes)} ({row.budget_share:.2f}): "
            f"{row.predicted_ratio:.3f}x the time{below}"
        )

    # --- as a table, JSON and a picture ---

    def heading(self) -> str:
        """See `Curve`."""
        return (
            f"{self.title}\nnothing recomputed: {size_text(self.baseline.baseline_peak_bytes)}, "
            f"{self.baseline.baseline_ms:,.1f} ms a step ({self.seconds_text})"
        )

    def columns(self) -> list[Column]:
        """See `Curve`."""
        columns = [
            Column("strategy", lambda row: row.strategy),
            Column("budget", lambda row: size_text(row.budget_bytes)),
            Column("share", lambda row: f"{row.budget_share:.3f}", 3),
            Column("peak", lambda row: sized(row.predicted_peak_bytes), 5),
            Column("ms", lambda row: number(row.predicted_ms, ",.1f"), 6),
            Column("time", lambda row: number(row.predicted_ratio, ".3f", "x")),
            Column("ms/100 MiB", lambda row: number(row.extra_ms_per_100_mib, ",.1f"), 7),
        ]
        if any(row.loss_chunks for row in self.rows):
            columns.append(Column("chunks", lambda row: row.loss_chunks, 4))
        if any(row.moved_bytes for row in self.rows):
            columns.append(Column("moved", lambda row: sized(row.moved_bytes), 5))
        if any(row.is_measured for row in self.rows):
            columns += [
                Column("measured peak", lambda row: sized(row.measured_peak_bytes), 4),
                Column("measured ms", lambda row: number(row.measured_ms, ",.1f"), 8),
                Column("measured", lambda row: number(row.measured_ratio, ".3f", "x"), 1),
                Column("gradients", _gradients, 2),
            ]
        return columns if len(self.strategies) > 1 else columns[1:]

    def note(self, row: SweepRow) -> str:
        """See `Curve`."""
        if row.broken_promise:
            return "FAILED"
        if row.is_feasible:
            return "<- knee" if row.is_recommended else "stopped" if row.problem else ""
        return "no plan" if row.minimum_bytes is None else f"needs {size_text(row.minimum_bytes)}"

    def remarks(self) -> str:
        """See `Curve`."""
        lines = [f"  {self.recommendation(row)}" for row in self.recommended]
        if lines:
            lines.insert(0, "Knees of the curve, where less memory begins to cost more:")
        failed = [f"FAILED: {line}" for line in self.broken_promises]
        return "\n\n".join("\n".join(part) for part in (lines, failed) if part)

    def facts(self) -> dict[str, Any]:
        """See `Curve`."""
        return {**self.settings, "title": self.title, "is_complete": self.is_complete}

    def figure(self) -> Any:
        """See `Curve`."""
        peak_bytes = self.baseline.baseline_peak_bytes
        return sweep_figure(self.rows, self.knee, baseline_peak_bytes=peak_bytes)


def _gradients(row: SweepRow) -> str:
    """How the measured gradients compare with eager's."""
    if row.gradient_difference is None:
        return "not compared" if row.is_measured else ""
    return "bitwise" if row.gradient_difference == 0 else f"{row.gradient_difference:.0e}"
