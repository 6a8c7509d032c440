"""A sweep on a terminal: one row a budget, as many columns as fit its width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rockmate.budget import size_text
from rockmate.sweeps.result import Sweep
from rockmate.sweeps.row import SweepRow

_GAP = "  "
KNEE = "<- knee"


@dataclass(frozen=True, slots=True)
class _Column:
    """One column. Where width is short, the highest rank goes first; rank 0 always stays."""

    title: str
    rank: int
    cell: Callable[[SweepRow], str]


def table_text(sweep: Sweep, *, width: int) -> str:
    """The rows of a sweep as text.

    Args:
        sweep: with its rows.
        width: characters in a line, which no line of the table exceeds as long as strategy, budget,
            time and note fit.
    """
    columns = _columns(sweep)
    while _width(columns, sweep.rows) > width and (
        droppable := [column for column in columns if column.rank]
    ):
        columns.remove(max(droppable, key=lambda column: column.rank))
    cells = [
        [column.title for column in columns],
        *([column.cell(row) for column in columns] for row in sweep.rows),
    ]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    lines = [
        _GAP.join(cell.rjust(size) for cell, size in zip(line, widths, strict=True))
        for line in cells
    ]
    notes = ["", *(_note(row) for row in sweep.rows)]
    lines = [f"{line}{_GAP}{note}".rstrip() for line, note in zip(lines, notes, strict=True)]
    lines.insert(1, _GAP.join("-" * size for size in widths))
    return "\n".join(lines)


def recommendation_text(sweep: Sweep) -> str:
    """The recommended budgets, a line each."""
    lines = [
        f"{row.strategy}, {size_text(row.budget_bytes)} ({row.budget_share:.2f}): "
        f"{row.predicted_ratio:.3f}x the time"
        + (
            ""
            if (cost := cost_below(sweep, row)) is None
            else f"; below it, 100 MiB less cost {cost:,.1f} ms a step"
        )
        for row in sweep.recommended
    ]
    return (
        "\n".join(
            [
                "Knees of the curve, where less memory begins to cost more:",
                *(f"  {line}" for line in lines),
            ]
        )
        if lines
        else ""
    )


def cost_below(sweep: Sweep, row: SweepRow) -> float | None:
    """Milliseconds that 100 MiB less cost from a row to the next smaller one of its strategy.

    None for the smallest row.
    """
    smaller = [
        other
        for other in sweep.rows
        if other.strategy == row.strategy and other.budget_bytes < row.budget_bytes
    ]
    return smaller[-1].extra_ms_per_100_mib if smaller else None


def _columns(sweep: Sweep) -> list[_Column]:
    columns = [
        _Column("strategy", 0, lambda row: row.strategy),
        _Column("budget", 0, lambda row: size_text(row.budget_bytes)),
        _Column("share", 3, lambda row: f"{row.budget_share:.3f}"),
        _Column("peak", 5, lambda row: _size(row.predicted_peak_bytes)),
        _Column("ms", 6, lambda row: _number(row.predicted_ms, ",.1f")),
        _Column("time", 0, lambda row: _number(row.predicted_ratio, ".3f", "x")),
        _Column("ms/100 MiB", 7, lambda row: _number(row.extra_ms_per_100_mib, ",.1f")),
    ]
    if any(row.loss_chunks for row in sweep.rows):
        columns.append(_Column("chunks", 4, lambda row: row.loss_chunks))
    if any(row.moved_bytes for row in sweep.rows):
        columns.append(_Column("moved", 5, lambda row: _size(row.moved_bytes)))
    if any(row.is_measured for row in sweep.rows):
        columns += [
            _Column("measured peak", 4, lambda row: _size(row.measured_peak_bytes)),
            _Column("measured ms", 8, lambda row: _number(row.measured_ms, ",.1f")),
            _Column("measured", 1, lambda row: _number(row.measured_ratio, ".3f", "x")),
            _Column("gradients", 2, gradients_text),
        ]
    return columns if len(sweep.strategies) > 1 else columns[1:]


def gradients_text(row: SweepRow) -> str:
    """How the measured gradients compare with eager's."""
    if row.gradient_difference is None:
        return "not compared" if row.is_measured else ""
    return "bitwise" if row.gradient_difference == 0 else f"{row.gradient_difference:.0e}"


def _width(columns: Sequence[_Column], rows: Sequence[SweepRow]) -> int:
    cells = sum(
        max(len(column.title), *(len(column.cell(row)) for row in rows)) + len(_GAP)
        for column in columns
    )
    return cells + max((len(_note(row)) for row in rows), default=0)


def _note(row: SweepRow) -> str:
    if row.broken_promise:
        return "FAILED"
    if row.is_feasible:
        return KNEE if row.is_recommended else "stopped" if row.problem else ""
    return "no plan" if row.minimum_bytes is None else f"needs {size_text(row.minimum_bytes)}"


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else size_text(num_bytes)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
