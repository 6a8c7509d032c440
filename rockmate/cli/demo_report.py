"""The report of the demonstration: one table, the verdicts, and a picture of memory over a step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rockmate import Plan
from rockmate.budget import size_text
from rockmate.cli.demo import BACKWARD_MARK, DemoResult, mebibytes
from rockmate.curves.figures import save_figure
from rockmate.curves.picture import step_figure
from rockmate.frames.report import FramesReport

_NUM_NAMED = 3


def report(result: DemoResult) -> str:
    """The one table, and what follows from it."""
    eager, planned = result.eager, result.planned
    eager_bytes = eager.memory.peak_bytes
    eager_ms, planned_ms = statistics.median(eager.times_ms), statistics.median(planned.times_ms)
    rows = [("", "eager", "RockmateModule", "ratio")]
    for index, (theirs, own) in enumerate(zip(eager.losses, planned.losses, strict=True)):
        verdict = "identical" if theirs == own else "DIFFERENT"
        rows.append((f"loss of step {index + 1}", f"{theirs:.7f}", f"{own:.7f}", verdict))
    rows += [
        (),
        (
            "activation budget",
            "",
            mebibytes(result.budget_bytes),
            f"{result.budget_bytes / eager_bytes:.3f}",
        ),
        *_predicted_peak(result),
        (
            "activation peak, measured",
            mebibytes(eager_bytes),
            mebibytes(planned.memory.peak_bytes),
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
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.stage_s.items())
    lines = [result.title, "", *_table(rows)]
    if result.frames is not None:
        lines += ["", "Frames, in the last step:", result.frames.summary()]
    if stages:
        lines += ["", f"Planning: {stages}."]
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
    return [("activation peak, predicted", mebibytes(before), mebibytes(after), ratio)]


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


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Left-aligned first column, the others right-aligned.

    An empty row is a rule, and one follows the head.
    """
    filled = [row for row in rows if row]
    widths = [max(len(row[column]) for row in filled) for column in range(len(filled[0]))]
    rule = "  ".join("-" * width for width in widths)
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        cells[:1] = [cell.ljust(widths[0]) for cell in row[:1]]
        lines.append("  ".join(cells).rstrip() if row else rule)
    lines.insert(1, rule)
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
    note = frames_note(result.frames) if result.plan is None else peak_note(result.plan)
    figure = step_figure(
        curves,
        budget_bytes=result.budget_bytes,
        backward_ms=1e3 * result.planned.memory.marks[BACKWARD_MARK],
        xlabel="time since the forward was called (ms)",
        notes=[result.title, *note.splitlines()],
    )
    save_figure(figure, path)


def peak_note(plan: Plan) -> str:
    """Where the plan's peak is and the largest of what is in memory there, a line each."""
    live = plan.live_at_peak()
    lines = [
        f"peak in {plan.peak_place()}",
        *(f"{size_text(num_bytes)}  {text}" for text, num_bytes in live[:_NUM_NAMED]),
    ]
    rest = live[_NUM_NAMED:]
    if rest:
        lines.append(f"{size_text(sum(num_bytes for _, num_bytes in rest))}  in {len(rest)} more")
    return "\n".join(lines)


def frames_note(frames: FramesReport | None) -> str:
    """What frames dropped in their last step."""
    assert frames is not None
    counts = frames.counts
    return (
        f"{counts.num_dropped} of {counts.num_frames} frames dropped something,\n"
        f"which was recomputed in {1e3 * counts.recomputed_s:.0f} ms"
    )
