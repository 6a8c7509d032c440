"""Memory over one training step, as a picture.

The eager run and the planned one, the budget, forward and backward.

Needs matplotlib. Draws on a figure of its own and leaves matplotlib's global state alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rockmate.budget import size_text
from rockmate.curves.figures import save_figure

if TYPE_CHECKING:
    from rockmate._torch.allocator import Timeline
    from rockmate.cli.demo import DemoResult
    from rockmate.frames.report import FramesReport
    from rockmate.plan.plan import Plan

_EAGER_COLOR = "#8a8f98"
_PLANNED_COLOR = "#1f6fb4"
_BUDGET_COLOR = "#c8322b"
_INK = "#2b2e33"
_DOTTED = (0, (1, 2))
_MIB = 2**20
_NUM_NAMED = 3


def save_memory_plot(result: DemoResult, path: Path, *, backward_mark: str) -> None:
    """Write the picture of both runs' live activation bytes to `path`.

    Args:
        result: both runs and the plan.
        path: a file name that ends in .png, .pdf or .svg.
        backward_mark: the mark in both timelines at which the backward begins.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.4), layout="constrained", facecolor="white")
    axes: Any = figure.subplots()
    eager, planned = result.eager.memory, result.planned.memory
    longest_ms = 1e3 * max(eager.duration_s, planned.duration_s)
    top = eager.peak_bytes / _MIB

    _curve(axes, eager, _EAGER_COLOR, label=f"eager, peak {top:.0f} MiB")
    planned_label = f"RockmateModule, peak {planned.peak_bytes / _MIB:.0f} MiB"
    _curve(axes, planned, _PLANNED_COLOR, label=planned_label)
    budget_mib = result.budget_bytes / _MIB
    axes.axhline(
        budget_mib,
        color=_BUDGET_COLOR,
        linestyle=(0, (5, 3)),
        linewidth=1.4,
        label=f"budget {budget_mib:.0f} MiB",
    )
    _phase_boundary(axes, eager, backward_mark, _EAGER_COLOR)
    _phase_boundary(axes, planned, backward_mark, _PLANNED_COLOR)

    note = frames_note(result.frames) if result.plan is None else peak_note(result.plan)
    _name_peak(axes, planned, note, longest_ms=longest_ms, top_mib=top)

    boundary_ms = 1e3 * planned.marks[backward_mark]
    for text, x_ms in (("forward", boundary_ms / 2), ("backward", (boundary_ms + longest_ms) / 2)):
        axes.text(x_ms, 1.17 * top, text, ha="center", va="center", color=_INK, fontsize=11)
    axes.set_xlim(0, longest_ms * 1.01)
    axes.set_ylim(0, 1.22 * top)
    axes.set_xlabel("time since the forward was called (ms)", color=_INK)
    axes.set_ylabel("live activation memory (MiB)", color=_INK)
    axes.plot([], [], color=_INK, linewidth=1.0, linestyle=_DOTTED, label="end of forward")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, frameon=False, labelcolor=_INK
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    axes.grid(axis="y", color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.suptitle("Memory over one training step", color=_INK, fontsize=13, fontweight="bold")
    axes.set_title(result.title, color=_INK, fontsize=9)
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


def _name_peak(
    axes: Any, memory: Timeline, note: str, *, longest_ms: float, top_mib: float
) -> None:
    seconds, live = max(memory.points, key=lambda point: point[1])
    peak_ms, peak_mib = 1e3 * seconds, live / _MIB
    is_late = peak_ms > longest_ms / 2
    axes.annotate(
        note,
        xy=(peak_ms, peak_mib),
        xytext=(longest_ms * (0.99 if is_late else 0.01), top_mib * 1.1),
        ha="right" if is_late else "left",
        va="top",
        fontsize=7,
        color=_INK,
        arrowprops={"arrowstyle": "->", "color": _PLANNED_COLOR, "linewidth": 0.9},
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "#e4e6ea", "alpha": 0.9},
    )


def _curve(axes: Any, memory: Timeline, color: str, *, label: str) -> None:
    milliseconds = [1e3 * seconds for seconds, _ in memory.points] + [1e3 * memory.duration_s]
    mebibytes = [live / _MIB for _, live in memory.points]
    mebibytes.append(mebibytes[-1])
    axes.fill_between(milliseconds, mebibytes, step="post", color=color, alpha=0.22, linewidth=0)
    axes.step(milliseconds, mebibytes, where="post", color=color, linewidth=1.3, label=label)


def _phase_boundary(axes: Any, memory: Timeline, mark: str, color: str) -> None:
    axes.axvline(1e3 * memory.marks[mark], color=color, linewidth=1.0, linestyle=_DOTTED)
