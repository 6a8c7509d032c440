"""The pictures of curves: time against peak, memory over a step, memory by part at each size.

Needs matplotlib. Draws on figures of their own and leaves matplotlib's global state alone. A figure
is as wide as a phone shows it, so that its text can be read there.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from html import escape
from typing import TYPE_CHECKING, Any

from rockmate.budget import size_text
from rockmate.costs.cost import Costs
from rockmate.curves.fit_row import PARTS
from rockmate.extras import require
from rockmate.plan.plan import Plan
from rockmate.schedule.schedule import Schedule

if TYPE_CHECKING:
    from rockmate.curves.fit import Fit
    from rockmate.curves.sweep import Sweep

_COLOURS = ("#1f6fb4", "#c2701c", "#2f8a57", "#8a56b8", "#b8475f")
_PART_COLOURS = ("#bbbbbb", "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")
_GREY, _RED = "#8a8f98", "#c8322b"
_WIDTH = 5.6  # inches
_STYLE = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e4e6ea",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "rockmate",
}
# Number of points above which only the highest of each stretch is drawn.
_MAX_POINTS = 500

Point = tuple[float, float]


def row_address(key: tuple[str, int]) -> str:
    """The id of what a page says of a row; marks of the picture lead to it."""
    return f"budget-{key[0]}-{key[1]}"


# --- a sweep --------------------------------------------------------------------------------------


def sweep_figure(sweep: Sweep) -> Any:
    """Time over peak, a curve for each strategy: predicted, and below it measured."""
    has_measured = any(row.measured_ratio is not None for row in sweep)
    with _style():
        figure = _figure(6.4 if has_measured else 4.2)
        axes = figure.subplots(2 if has_measured else 1, 1, squeeze=False)[:, 0]
        most = max(
            sweep.baseline.baseline_peak_bytes, *(row.eager_peak_bytes or 0 for row in sweep), 1
        )
        num_bytes, unit = _unit(most)
        _draw_predicted(axes[0], sweep, num_bytes)
        axes[0].set_title("Predicted time of a step,\ntimes that without recomputation")
        axes[0].set_xlabel(f"predicted activation peak ({unit})")
        if has_measured:
            _draw_measured(axes[1], sweep, num_bytes)
            axes[1].set_ylim(bottom=max(0.0, axes[1].get_ylim()[0]))
            axes[1].set_title("Measured time of a step, times eager's")
            axes[1].set_xlabel(f"measured activation peak ({unit})")
        for each in axes:
            each.set_xlim(0, 1.06 * most / num_bytes)
            low, high = each.get_ylim()
            each.yaxis.set_major_formatter("{x:.2f}x" if high - low > 0.04 else "{x:.3f}x")
        _legend(figure, axes)
    return figure


def _draw_predicted(axes: Any, sweep: Sweep, num_bytes: int) -> None:
    for strategy, colour in _strategies(sweep):
        rows = [row for row in sweep.feasible if row.strategy == strategy]
        peaks, ratios = [row.point[0] / num_bytes for row in rows], [row.point[1] for row in rows]
        axes.plot(peaks, ratios, color=colour, label=strategy)
        dots = axes.scatter(peaks, ratios, color=colour, s=28, zorder=3)
        dots.set_urls([f"#{row_address(row.key)}" for row in rows])
    first = [row for row in sweep.feasible if row.strategy == sweep.strategies[0]]
    bounds = [(row.budget_bytes / num_bytes, row.lower_bound_ratio) for row in first]
    bounds = [point for point in bounds if point[1]]
    if bounds:
        axes.plot(*zip(*bounds, strict=True), color=_GREY, ls=":", label="no schedule is faster")
    knees = [(row.point[0] / num_bytes, row.point[1]) for row in sweep.recommended]
    if knees:
        axes.scatter(
            *zip(*knees, strict=True), s=90, facecolors="none", edgecolors=_RED, lw=2, zorder=4,
            label="knee",
        )  # fmt: skip
    peak = sweep.baseline.baseline_peak_bytes
    axes.axvline(peak / num_bytes, color=_GREY, ls="--", lw=1, label="without recomputation")
    knee = sweep.knee
    if knee is not None:  # one of several, whose notes would cover each other
        axes.annotate(
            f"{size_text(knee.budget_bytes)}, {knee.predicted_ratio:.2f}x",
            (knee.point[0] / num_bytes, knee.point[1]),
            xytext=(8, 10),
            textcoords="offset points",
            color=_RED,
        )


def _draw_measured(axes: Any, sweep: Sweep, num_bytes: int) -> None:
    for strategy, colour in _strategies(sweep):
        rows = [row for row in sweep if row.strategy == strategy and row.measured_ratio is not None]
        if rows:
            axes.errorbar(
                [(row.measured_peak_bytes or 0) / num_bytes for row in rows],
                [row.measured_ratio for row in rows],
                yerr=[(row.measured_ratio_spread or 0.0) / 2 for row in rows],
                color=colour, marker="D", markerfacecolor="white", capsize=3,
            )  # fmt: skip
    peak = next(row.eager_peak_bytes for row in sweep if row.eager_peak_bytes)
    axes.axvline(peak / num_bytes, color="black", ls="-.", lw=1, label="eager")


def _strategies(sweep: Sweep) -> Iterable[tuple[str, str]]:
    for index, strategy in enumerate(sweep.strategies):
        yield strategy, _COLOURS[index % len(_COLOURS)]


# --- a step ---------------------------------------------------------------------------------------


def memory_figure(baseline: Plan, plan: Plan) -> Any:
    """Memory over the time of one step, of a plan and of the baseline."""
    top = max(baseline.predicted_peak_bytes, plan.budget_bytes)
    num_bytes, unit = _unit(top)
    # Both with the plan's op times: a plan of an earlier run has those of that run.
    begins = times_ms(plan.schedule, plan.costs)
    with _style():
        figure = _figure(3.8)
        axes = figure.subplots()
        for each, colour, label in (
            (baseline, _GREY, "without recomputation"),
            (plan, _COLOURS[0], "this plan"),
        ):
            points = memory_points(each, plan.costs)
            end = times_ms(each.schedule, plan.costs)[-1]
            times = [*(point[0] for point in points), end]
            heights = [*(point[1] / num_bytes for point in points), points[-1][1] / num_bytes]
            axes.fill_between(
                times, heights, step="post", facecolor=(colour, 0.2), edgecolor=colour, label=label
            )
        axes.axhline(plan.budget_bytes / num_bytes, color=_RED, ls="--", lw=1, label="budget")
        axes.axvline(
            begins[len(plan.schedule.forward)], color=_GREY, ls=":", label="end of the forward"
        )
        position = plan.simulation.peak_position
        peak = begins[position], plan.predicted_peak_bytes / num_bytes
        axes.plot(*peak, "o", color=_RED, label="peak")
        axes.set_ylim(0, 1.08 * top / num_bytes)
        axes.set_xlim(left=0)
        axes.set_title(f"Activation memory ({unit})")
        axes.set_xlabel("predicted time since the forward was called (ms)")
        _legend(figure, [axes])
    return figure


def memory_points(plan: Plan, costs: Costs) -> list[Point]:
    """For each run, the predicted ms at which it begins and the bytes in use while it runs.

    Long schedules have one point for each stretch of runs: the highest.
    """
    live = plan.simulation.live_bytes
    points = [*zip(times_ms(plan.schedule, costs), live, strict=False)]
    stretch = -(-len(points) // _MAX_POINTS)
    return [
        max(points[begin : begin + stretch], key=lambda point: point[1])
        for begin in range(0, len(points), stretch)
    ]


def times_ms(schedule: Schedule, costs: Costs) -> list[float]:
    """When each run of the schedule begins, and when the last one ends."""
    times, seen = [0.0], set()
    for index in schedule.steps:
        cost = (costs.recompute if index in seen else costs.first)[index]
        seen.add(index)
        times.append(times[-1] + cost.time_ms)
    return times


# --- a fit ----------------------------------------------------------------------------------------


def fit_figure(fit: Fit) -> Any:
    """The speed, and below it memory by part, at each size."""
    num_bytes, unit = _unit(fit.memory_bytes)
    places, below = range(len(fit)), [0.0] * len(fit)
    with _style():
        figure = _figure(6.2)
        speeds, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
        speed = [row.speed(fit.axis) for row in fit]
        speeds.plot(places, speed, color="black", marker="o")
        speeds.set_ylim(0, 1.1 * max(speed))
        speeds.set_title(f"{fit.unit.capitalize()} a second")
        for (name, part), colour in zip(PARTS.items(), _PART_COLOURS, strict=True):
            heights = [getattr(row, name) / num_bytes for row in fit]
            axes.bar(places, heights, bottom=below, label=part, color=colour, width=0.7)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        memory = fit.memory_bytes / num_bytes
        axes.axhline(memory, color="black", ls="--", lw=1, label="memory")
        axes.set_ylim(top=1.05 * memory)
        axes.set_xticks(places, [f"{row.size(fit.axis):,}" for row in fit])
        axes.set_title(f"{unit} at the peak of a step")
        axes.set_xlabel("rows in a batch" if fit.axis == "batch" else "tokens in a sequence")
        _legend(figure, [axes])
        figure.suptitle(fit.title, fontsize="small", wrap=True)
    return figure


# --- figures --------------------------------------------------------------------------------------


def svg(figure: Any, title: str) -> str:
    """A figure as SVG that can stand in an HTML page, with names of its own.

    `title` tells what it shows to those who do not see it. The names are of it, too.
    """
    file = io.StringIO()
    with _style():
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Type")))
    text = file.getvalue()
    own = f"p{zlib.crc32((title + text).encode()):x}-"
    out = r"<metadata>.*?</metadata>|\sxmlns(:\w+)?=\"[^\"]*\"|\starget=\"_blank\""
    text = re.sub(out, "", text, flags=re.DOTALL)
    text = re.sub(r"(\sid=\"|href=\"#|url\(#)(?!budget-)", rf"\g<1>{own}", text)
    return text[text.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="{escape(title)}"', 1
    )


def _style() -> AbstractContextManager[None]:
    matplotlib = require("matplotlib", extra="plot", purpose="the picture of a curve")
    return matplotlib.rc_context(_STYLE)


def _figure(height: float) -> Any:
    figures = require("matplotlib.figure", extra="plot", purpose="the picture of a curve")
    return figures.Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="white")


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """One legend below all axes."""
    handles = [handle for each in axes for handle in each.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")


def _unit(most_bytes: int) -> tuple[int, str]:
    """Bytes and name of the unit for an axis that reaches so far."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most_bytes >= 1024**power:
            return 1024**power, name
    return 1, "bytes"
