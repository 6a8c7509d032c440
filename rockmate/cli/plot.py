"""Memory over one training step as it was measured, eager and planned, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rockmate.budget import size_text
from rockmate.curves.figures import save_figure
from rockmate.curves.picture import step_figure

if TYPE_CHECKING:
    from rockmate.cli.demo import DemoResult
    from rockmate.frames.report import FramesReport
    from rockmate.plan.plan import Plan

_NUM_NAMED = 3


def save_memory_plot(result: DemoResult, path: Path, *, backward_mark: str) -> None:
    """Write the picture of both runs' live activation bytes to `path`.

    Args:
        result: both runs and the plan.
        path: a file name that ends in .png, .pdf or .svg.
        backward_mark: the mark in both timelines at which the backward begins.
    """
    curves = {}
    for name, run in (("eager", result.eager), ("RockmateModule", result.planned)):
        points = [(1e3 * seconds, live) for seconds, live in run.memory.points]
        label = f"{name}, {size_text(run.memory.peak_bytes)}"
        curves[label] = [*points, (1e3 * run.memory.duration_s, points[-1][1])]
    note = frames_note(result.frames) if result.plan is None else peak_note(result.plan)
    figure = step_figure(
        curves,
        budget_bytes=result.budget_bytes,
        backward_ms=1e3 * result.planned.memory.marks[backward_mark],
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
