"""The report of the demonstration: one table, the verdicts, and a picture of memory over a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from rockmate.budget import size_text
from rockmate.cli.demo import BACKWARD_MARK, DemoResult
from rockmate.curves.figures import save_figure
from rockmate.curves.page import peak_text
from rockmate.curves.picture import step_figure
from rockmate.curves.table import Column, table_text

_NUM_NAMED = 3


def report(result: DemoResult) -> str:
    """The one table, and what follows from it."""
    eager, planned, plan = result.eager, result.planned, result.plan
    eager_bytes = eager.memory.peak_bytes
    eager_ms, planned_ms = statistics.median(eager.times_ms), statistics.median(planned.times_ms)
    rows: list[tuple[str, ...]] = []
    for index, (theirs, own) in enumerate(zip(eager.losses, planned.losses, strict=True)):
        verdict = "identical" if theirs == own else "DIFFERENT"
        rows.append((f"loss of step {index + 1}", f"{theirs:.7f}", f"{own:.7f}", verdict))
    budget_share = f"{plan.budget_bytes / eager_bytes:.3f}"
    time_ratio = f"{result.measured_ratio:.3f}"
    peaks = plan.baseline_peak_bytes, plan.predicted_peak_bytes
    rows += [
        ("activation budget", "", size_text(plan.budget_bytes), budget_share),
        _compared("activation peak, predicted", *peaks, size_text),
        _compared("activation peak, measured", eager_bytes, planned.memory.peak_bytes, size_text),
        _compared("step time, predicted", plan.baseline_ms, plan.predicted_ms, _ms),
        ("step time, measured (median)", _ms(eager_ms), _ms(planned_ms), time_ratio),
        ("planning time", "", f"{result.planning_s:.1f} s", ""),
    ]
    width = max(len(row[0]) for row in rows)
    titles = [("eager", 1), ("RockmateModule", 2), ("ratio", 3)]
    columns = [Column("", lambda row: row[0].ljust(width))]
    columns += [Column(title, itemgetter(at)) for title, at in titles]
    lines = [result.title, "", table_text(columns, rows, lambda _: "")]
    stages = (f"{name} {seconds:.1f} s" for name, seconds in result.stage_s.items())
    lines += [
        "",
        f"Planning: {', '.join(stages)}.",
        "Measured times are medians; their ratio is the median over steps of one step's time over "
        "the other's right before it.",
    ]
    return "\n".join([*lines, *_verdicts(result)]) + "\n"


def _compared(
    title: str, before: float, after: float, text: Callable[[Any], str]
) -> tuple[str, str, str, str]:
    return title, text(before), text(after), f"{after / before:.3f}"


def _verdicts(result: DemoResult) -> list[str]:
    num_steps = len(result.eager.losses)
    if result.equal_losses and result.equal_weights:
        lines = [
            f"Losses: identical in all {num_steps} steps, and so is every weight after them, bit "
            "by bit."
        ]
    elif result.equal_losses:
        lines = [
            f"FAILED: the losses are identical in all {num_steps} steps, but the weights after "
            "them are not."
        ]
    else:
        lines = ["FAILED: the losses are not identical."]
    measured, budget = result.planned.memory.peak_bytes, result.plan.budget_bytes
    if result.fits:
        lines.append(
            f"Memory: the measured peak is inside the budget, with {budget - measured:,} bytes to "
            "spare."
        )
    else:
        lines.append(f"FAILED: the measured peak is {measured - budget:,} bytes above the budget.")
    return lines


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms"


# --- the picture ------------------------------------------------------------------------------


def save_memory_plot(result: DemoResult, path: Path) -> None:
    """Writes the picture of both runs' live activation bytes; the suffix tells its format."""
    curves = {}
    for name, run in (("eager", result.eager), ("RockmateModule", result.planned)):
        points = [(1e3 * seconds, live) for seconds, live in run.memory.points]
        label = f"{name}, {size_text(run.memory.peak_bytes)}"
        curves[label] = [*points, (1e3 * run.memory.duration_s, points[-1][1])]
    note = peak_text(result.plan, _NUM_NAMED)
    figure = step_figure(
        curves,
        budget_bytes=result.plan.budget_bytes,
        backward_ms=1e3 * result.planned.memory.marks[BACKWARD_MARK],
        xlabel="time since the forward was called (ms)",
        notes=[result.title, *note.splitlines()],
    )
    save_figure(figure, path)
