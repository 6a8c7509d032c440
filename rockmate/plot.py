"""Memory over one training step, as a picture: the eager run and the planned one, the budget, forward and backward.

Needs matplotlib. Draws on a figure of its own and leaves matplotlib's global state alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rockmate.allocations import Timeline
    from rockmate.demo import DemoResult

_EAGER_COLOR = "#8a8f98"
_PLANNED_COLOR = "#1f6fb4"
_BUDGET_COLOR = "#c8322b"
_INK = "#2b2e33"
_DOTTED = (0, (1, 2))
_MIB = 2**20


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
    budget_mib = result.plan.budget_bytes / _MIB
    axes.axhline(budget_mib, color=_BUDGET_COLOR, linestyle=(0, (5, 3)), linewidth=1.4, label=f"budget {budget_mib:.0f} MiB")
    _phase_boundary(axes, eager, backward_mark, _EAGER_COLOR)
    _phase_boundary(axes, planned, backward_mark, _PLANNED_COLOR)

    boundary_ms = 1e3 * planned.marks[backward_mark]
    for text, x_ms in (("forward", boundary_ms / 2), ("backward", (boundary_ms + longest_ms) / 2)):
        axes.text(x_ms, 1.17 * top, text, ha="center", va="center", color=_INK, fontsize=11)
    axes.set_xlim(0, longest_ms * 1.01)
    axes.set_ylim(0, 1.22 * top)
    axes.set_xlabel("time since the forward was called (ms)", color=_INK)
    axes.set_ylabel("live activation memory (MiB)", color=_INK)
    axes.plot([], [], color=_INK, linewidth=1.0, linestyle=_DOTTED, label="end of forward")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, frameon=False, labelcolor=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    axes.grid(axis="y", color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.suptitle("Memory over one training step", color=_INK, fontsize=13, fontweight="bold")
    axes.set_title(result.title, color=_INK, fontsize=9)
    figure.savefig(path, dpi=150)


def _curve(axes: Any, memory: Timeline, color: str, *, label: str) -> None:
    milliseconds = [1e3 * seconds for seconds, _ in memory.points] + [1e3 * memory.duration_s]
    mebibytes = [live / _MIB for _, live in memory.points]
    mebibytes.append(mebibytes[-1])
    axes.fill_between(milliseconds, mebibytes, step="post", color=color, alpha=0.22, linewidth=0)
    axes.step(milliseconds, mebibytes, where="post", color=color, linewidth=1.3, label=label)


def _phase_boundary(axes: Any, memory: Timeline, mark: str, color: str) -> None:
    axes.axvline(1e3 * memory.marks[mark], color=color, linewidth=1.0, linestyle=_DOTTED)
