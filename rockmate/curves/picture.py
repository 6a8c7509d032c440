"""The pictures of curves: time against peak, memory over a step, memory by part at each size.

Needs matplotlib; see `rockmate.curves.figures`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rockmate.budget import size_text
from rockmate.costs.cost import Costs
from rockmate.curves.figures import add_legend, new_figure, style, unit_of
from rockmate.curves.fit_row import PARTS, FitRow
from rockmate.curves.sweep_row import SweepRow
from rockmate.plan.plan import Plan
from rockmate.schedule.schedule import Schedule

_COLOURS = ("#1f6fb4", "#c2701c", "#2f8a57", "#8a56b8", "#b8475f")
_PART_COLOURS = ("#bbbbbb", "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")
_GREY, _RED = "#8a8f98", "#c8322b"
_LINE = 60  # characters of a note that the width holds
# Number of points above which only the highest of each stretch is drawn.
_MAX_POINTS = 500

Point = tuple[float, float]


# --- a sweep --------------------------------------------------------------------------------------


def sweep_figure(rows: Sequence[SweepRow], *, baseline_peak_bytes: int) -> Any:
    """Time over peak, a curve for each strategy: predicted, and below it measured."""
    has_measured = any(row.measured_ratio is not None for row in rows)
    most = max(baseline_peak_bytes, *(row.eager_peak_bytes or 0 for row in rows), 1)
    num_bytes, unit = unit_of(most)
    with style():
        figure = new_figure(6.4 if has_measured else 4.2)
        axes = figure.subplots(2 if has_measured else 1, 1, squeeze=False)[:, 0]
        _draw_predicted(axes[0], rows, num_bytes)
        peak = baseline_peak_bytes / num_bytes
        axes[0].axvline(peak, color=_GREY, ls="--", lw=1, label="without recomputation")
        axes[0].set_title("Predicted time of a step,\ntimes that without recomputation")
        axes[0].set_xlabel(f"predicted activation peak ({unit})")
        if has_measured:
            _draw_measured(axes[1], rows, num_bytes)
            axes[1].set_ylim(bottom=max(0.0, axes[1].get_ylim()[0]))
            axes[1].set_title("Measured time of a step, times eager's")
            axes[1].set_xlabel(f"measured activation peak ({unit})")
        for each in axes:
            each.set_xlim(0, 1.06 * most / num_bytes)
            low, high = each.get_ylim()
            each.yaxis.set_major_formatter("{x:.2f}x" if high - low > 0.04 else "{x:.3f}x")
        add_legend(figure, axes)
    return figure


def _draw_predicted(axes: Any, rows: Sequence[SweepRow], num_bytes: int) -> None:
    curves = _curves(rows)
    for (strategy, curve), colour in zip(curves.items(), _COLOURS * len(curves), strict=False):
        feasible = [row for row in curve if row.is_feasible]
        peaks = [row.point[0] / num_bytes for row in feasible]
        ratios = [row.point[1] for row in feasible]
        axes.plot(peaks, ratios, color=colour, label=strategy)
        dots = axes.scatter(peaks, ratios, color=colour, s=28, zorder=3)
        dots.set_urls([f"#{row.address}" for row in feasible])
    bounded = [row for row in next(iter(curves.values()), []) if row.lower_bound_ratio]
    if bounded:  # within a budget no schedule is faster, so none is within the plan's peak
        axes.plot(
            [row.point[0] / num_bytes for row in bounded],
            [row.lower_bound_ratio for row in bounded],
            color=_GREY, ls=":", label="no schedule is faster",
        )  # fmt: skip
    for row in (each for each in rows if each.is_recommended):
        place = row.point[0] / num_bytes, row.point[1]
        ring = {"facecolors": "none", "edgecolors": _RED, "lw": 2, "zorder": 4}
        axes.scatter(*place, s=90, label="recommended", **ring)
        text = f"{size_text(row.budget_bytes)}, {row.predicted_ratio:.2f}x"
        axes.annotate(text, place, (8, 10), textcoords="offset points", color=_RED)


def _draw_measured(axes: Any, rows: Sequence[SweepRow], num_bytes: int) -> None:
    curves = _curves(rows)
    for curve, colour in zip(curves.values(), _COLOURS * len(curves), strict=False):
        measured = [row for row in curve if row.measured_ratio is not None]
        axes.errorbar(
            [(row.measured_peak_bytes or 0) / num_bytes for row in measured],
            [row.measured_ratio for row in measured],
            yerr=[(row.measured_ratio_spread or 0.0) / 2 for row in measured],
            color=colour, marker="D", markerfacecolor="white", capsize=3,
        )  # fmt: skip
    peak = next(row.eager_peak_bytes for row in rows if row.eager_peak_bytes)
    axes.axvline(peak / num_bytes, color="black", ls="-.", lw=1, label="eager")


def _curves(rows: Sequence[SweepRow]) -> dict[str, list[SweepRow]]:
    curves: dict[str, list[SweepRow]] = {}
    for row in rows:
        curves.setdefault(row.strategy, []).append(row)
    return curves


# --- a step ---------------------------------------------------------------------------------------


def memory_figure(baseline: Plan, plan: Plan) -> Any:
    """Memory over the time of one step, of a plan and of the baseline."""

    def curve(each: Plan) -> list[Point]:
        # Both with the plan's op times: a plan of an earlier run has those of that run.
        points = memory_points(each, plan.costs)
        return [*points, (times_ms(each.schedule, plan.costs)[-1], points[-1][1])]

    return step_figure(
        {"without recomputation": curve(baseline), "this plan": curve(plan)},
        budget_bytes=plan.budget_bytes,
        backward_ms=times_ms(plan.schedule, plan.costs)[len(plan.schedule.forward)],
        xlabel="predicted time since the forward was called (ms)",
    )


def step_figure(
    curves: Mapping[str, Sequence[Point]],
    *,
    budget_bytes: int,
    backward_ms: float,
    xlabel: str,
    notes: Sequence[str] = (),
) -> Any:
    """Memory over the time of one step, with notes below the title.

    Curves are, by label, the bytes from each time in ms on. The peak of the last one is marked.
    """
    top = max(budget_bytes, *(height for points in curves.values() for _, height in points))
    num_bytes, unit = unit_of(int(top))
    notes = [line for note in notes for line in textwrap.wrap(note, _LINE)]
    with style():
        figure = new_figure(3.8 + 0.2 * len(notes))
        axes = figure.subplots()
        for (label, points), colour in zip(curves.items(), (_GREY, _COLOURS[0]), strict=True):
            times, heights = zip(*points, strict=True)
            axes.fill_between(
                times, [each / num_bytes for each in heights], step="post",
                facecolor=(colour, 0.2), edgecolor=colour, label=label,
            )  # fmt: skip
        axes.axhline(budget_bytes / num_bytes, color=_RED, ls="--", lw=1, label="budget")
        axes.axvline(backward_ms, color=_GREY, ls=":", label="end of the forward")
        time, height = max([*curves.values()][-1], key=lambda point: point[1])
        axes.plot(time, height / num_bytes, "o", color=_RED, label="peak")
        axes.set_ylim(0, 1.08 * top / num_bytes)
        axes.set_xlim(left=0)
        axes.set_title("\n".join([f"Activation memory ({unit})", *notes]))
        axes.set_xlabel(xlabel)
        add_legend(figure, [axes])
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
    return [*accumulate((each.time_ms for each in schedule.run_costs(costs)), initial=0.0)]


# --- a fit ----------------------------------------------------------------------------------------


def fit_figure(rows: Sequence[FitRow], *, title: str, memory_bytes: int, axis: str) -> Any:
    """The speed, and below it memory by part, at each size."""
    num_bytes, unit = unit_of(memory_bytes)
    places, below = range(len(rows)), [0.0] * len(rows)
    with style():
        figure = new_figure(6.2)
        speeds, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
        speed = [row.speed(axis) for row in rows]
        speeds.plot(places, speed, color="black", marker="o")
        speeds.set_ylim(0, 1.1 * max(speed))
        speeds.set_title("Samples a second" if axis == "batch" else "Tokens a second")
        for (name, part), colour in zip(PARTS.items(), _PART_COLOURS, strict=True):
            heights = [getattr(row, name) / num_bytes for row in rows]
            axes.bar(places, heights, bottom=below, label=part, color=colour, width=0.7)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        memory = memory_bytes / num_bytes
        axes.axhline(memory, color="black", ls="--", lw=1, label="memory")
        axes.set_ylim(top=1.05 * memory)
        axes.set_xticks(places, [f"{row.size(axis):,}" for row in rows])
        axes.set_title(f"{unit} at the peak of a step")
        axes.set_xlabel("rows in a batch" if axis == "batch" else "tokens in a sequence")
        add_legend(figure, [axes])
        figure.suptitle(title, fontsize="small", wrap=True)
    return figure
