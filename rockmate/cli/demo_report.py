"""The report of the demonstration: one table, the verdicts, and a picture of memory over a step."""

from __future__ import annotations

import statistics
from operator import itemgetter
from pathlib import Path

from rockmate import Plan
from rockmate.budget import size_text
from rockmate.cli.demo import BACKWARD_MARK, DemoResult
from rockmate.curves.figures import save_figure
from rockmate.curves.page import peak_text
from rockmate.curves.picture import step_figure
from rockmate.curves.table import Column, table_text
from rockmate.frames.report import FramesReport

_NUM_NAMED = 3


def report(result: DemoResult) -> str:
    """The one table, and what follows from it."""
    eager, planned = result.eager, result.planned
    eager_bytes = eager.memory.peak_bytes
    eager_ms, planned_ms = statistics.median(eager.times_ms), statistics.median(planned.times_ms)
    rows: list[tuple[str, ...]] = []
    for index, (theirs, own) in enumerate(zip(eager.losses, planned.losses, strict=True)):
        verdict = "identical" if theirs == own else "DIFFERENT"
        rows.append((f"loss of step {index + 1}", f"{theirs:.7f}", f"{own:.7f}", verdict))
    rows += [
        (
            "activation budget",
            "",
            size_text(result.budget_bytes),
            f"{result.budget_bytes / eager_bytes:.3f}",
        ),
        *_predicted_peak(result),
        (
            "activation peak, measured",
            size_text(eager_bytes),
            size_text(planned.memory.peak_bytes),
            f"{planned.memory.peak_bytes / eager_bytes:.3f}",
        ),
        *_predicted_time(result.plan),
        (
            "step time, measured (median)",
            _ms(eager_ms),
            _ms(planned_ms),
            f"{result.measured_ratio:.3f}",
        ),
        ("planning time", "", f"{result.planning_s:.1f} s", ""),
    ]
    width = max(len(row[0]) for row in rows)
    titles = [("eager", 1), ("RockmateModule", 2), ("ratio", 3)]
    columns = [Column("", lambda row: row[0].ljust(width))]
    columns += [Column(title, itemgetter(at)) for title, at in titles]
    lines = [result.title, "", table_text(columns, rows, lambda _: "")]
    if result.frames is not None:
        lines += ["", "Frames, in the last step:", result.frames.summary()]
    if result.stage_s:
        stages = (f"{name} {seconds:.1f} s" for name, seconds in result.stage_s.items())
        lines += ["", f"Planning: {', '.join(stages)}."]
    lines.append(
        "Measured times are medians; their ratio is the median over steps of one step's time over "
        "the other's right before it."
    )
    return "\n".join([*lines, *_verdicts(result)]) + "\n"


def _predicted_peak(result: DemoResult) -> list[tuple[str, ...]]:
    if result.plan is not None:
        before, after = result.plan.baseline_peak_bytes, result.plan.predicted_peak_bytes
    else:
        assert result.frames is not None
        before, after = result.frames.baseline_bytes, result.frames.peak_bytes
    ratio = f"{after / before:.3f}"
    return [("activation peak, predicted", size_text(before), size_text(after), ratio)]


def _predicted_time(plan: Plan | None) -> list[tuple[str, ...]]:
    """Frames predict no time of a step."""
    if plan is None:
        return []
    ratio = f"{plan.predicted_ms / plan.baseline_ms:.3f}"
    return [("step time, predicted", _ms(plan.baseline_ms), _ms(plan.predicted_ms), ratio)]


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
    measured, budget = result.planned.memory.peak_bytes, result.budget_bytes
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
    note = frames_note(result.frames) if result.plan is None else peak_text(result.plan, _NUM_NAMED)
    figure = step_figure(
        curves,
        budget_bytes=result.budget_bytes,
        backward_ms=1e3 * result.planned.memory.marks[BACKWARD_MARK],
        xlabel="time since the forward was called (ms)",
        notes=[result.title, *note.splitlines()],
    )
    save_figure(figure, path)


def frames_note(frames: FramesReport | None) -> str:
    """What frames dropped in their last step."""
    assert frames is not None
    counts = frames.counts
    return (
        f"{counts.num_dropped} of {counts.num_frames} frames dropped something,\n"
        f"which was recomputed in {1e3 * counts.recomputed_s:.0f} ms"
    )
