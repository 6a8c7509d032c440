"""The drawings of a sweep's report: time against peak, and memory over the step."""

from __future__ import annotations

from collections.abc import Sequence

from rockmate.budget import size_text
from rockmate.costs.cost import Costs
from rockmate.plan.plan import Plan
from rockmate.schedule.schedule import Schedule
from rockmate.sweeps.result import Sweep
from rockmate.sweeps.row import SweepRow
from rockmate.sweeps.svg_chart import Chart, Point

_MIB = 2**20
# Number of points above which only the highest of each stretch is drawn.
_MAX_POINTS = 500
# Width of the axis as a multiple of the largest peak.
_HEADROOM = 1.06


def curve_chart(sweep: Sweep) -> str:
    """Time over peak: a curve for each strategy, the lower bound, measured points and the knee."""
    feasible = [row for row in sweep.rows if row.is_feasible]
    measured_bytes = (row.eager_peak_bytes for row in sweep.rows if row.eager_peak_bytes)
    eager_bytes = next(measured_bytes, None)
    chart = _curve_axes(sweep, feasible, eager_bytes or 0)
    if eager_bytes is not None:
        chart.vertical(eager_bytes / _MIB, "eager", f"eager {size_text(eager_bytes)}", anchor="end")
    for index, strategy in enumerate(sweep.strategies):
        rows = [row for row in feasible if row.strategy == strategy]
        if index == 0:
            bounds = ((row.budget_bytes / _MIB, row.lower_bound_ratio) for row in rows)
            chart.line([(x, ratio) for x, ratio in bounds if ratio], "bound")
        chart.line([_predicted(row) for row in rows], f"curve s{index}")
        for row in rows:
            _draw_row(chart, row, index)
    # One strategy's, since notes of several would cover each other.
    for row in sweep.recommended:
        if row.strategy == sweep.strategies[0]:
            text = f"{size_text(row.budget_bytes)}, {row.predicted_ratio:.2f}x"
            chart.note(_predicted(row), text, "knee-note")
    return chart.svg("Time of a step against activation peak, a curve for each strategy")


def _curve_axes(sweep: Sweep, feasible: Sequence[SweepRow], eager_bytes: int) -> Chart:
    peaks = [row.predicted_peak_bytes or 0 for row in feasible]
    peaks += [sweep.baseline.baseline_peak_bytes, eager_bytes]
    ratios = [
        ratio
        for row in feasible
        for ratio in (row.predicted_ratio, row.measured_ratio)
        if ratio is not None
    ]
    low, high = min([*ratios, 1.0]), max([*ratios, 1.1])
    y_range = (low - 0.08 * (high - low), high + 0.12 * (high - low))
    chart = Chart(x_range=(0.0, _HEADROOM * max(peaks) / _MIB), y_range=y_range, height=420)
    chart.axes(
        x_label="activation peak",
        y_label="time of a step, times that without recomputation",
        x_text=mebibytes,
        y_text=lambda value: f"{value:.2f}x",
    )
    return chart


def _draw_row(chart: Chart, row: SweepRow, index: int) -> None:
    kind = f"dot s{index}{' knee' if row.is_recommended else ''}"
    chart.dot(_predicted(row), kind, _row_title(row), key=row_key(row))
    if row.measured_peak_bytes is not None and row.measured_ratio is not None:
        title = (
            f"measured: {size_text(row.measured_peak_bytes)}, {row.measured_ratio:.3f}x of eager"
        )
        point = (row.measured_peak_bytes / _MIB, row.measured_ratio)
        chart.diamond(point, f"measured s{index}", title, key=row_key(row))


def _predicted(row: SweepRow) -> Point:
    return (row.predicted_peak_bytes or 0) / _MIB, row.predicted_ratio or 0.0


def _row_title(row: SweepRow) -> str:
    return (
        f"{row.strategy}, budget {size_text(row.budget_bytes)}: peak "
        f"{peak_text(row.predicted_peak_bytes)}, {row.predicted_ratio:.3f}x"
    )


def memory_chart(baseline: Plan, plan: Plan) -> str:
    """Memory over the time of one step, of a plan and of the baseline."""
    # Both with the plan's op times: a plan of an earlier run has those of that run.
    lanes = [memory_points(each, plan.costs) for each in (baseline, plan)]
    begins = times_ms(plan.schedule, plan.costs)
    ends = [times_ms(baseline.schedule, plan.costs)[-1], begins[-1]]
    top = max(baseline.predicted_peak_bytes, plan.budget_bytes) / _MIB
    chart = Chart(x_range=(0.0, max(ends)), y_range=(0.0, top * 1.12), height=340)
    x_label = "predicted time since the forward was called (ms)"
    chart.axes(
        x_label=x_label,
        y_label="activation memory",
        x_text=lambda value: f"{value:,g}",
        y_text=mebibytes,
    )
    for points, end, kind in zip(lanes, ends, ("step grey", "step s0"), strict=True):
        chart.steps(points, end, kind)
    chart.vertical(begins[len(plan.schedule.forward)], "half", "forward | backward")
    chart.horizontal(plan.budget_bytes / _MIB, "budget", f"budget {size_text(plan.budget_bytes)}")
    position = plan.simulation.peak_position
    peak: Point = (begins[position], plan.predicted_peak_bytes / _MIB)
    chart.dot(
        peak,
        "dot s0 knee",
        f"peak {size_text(plan.predicted_peak_bytes)} in {plan.peak_place()}",
        radius=4,
    )
    chart.note(peak, "peak", "knee-note")
    return chart.svg("Activation memory over one training step")


def memory_points(plan: Plan, costs: Costs) -> list[Point]:
    """For each run, the predicted ms at which it begins and the MiB in use while it runs.

    Long schedules have one point for each stretch of runs: the highest.
    """
    points = [
        (ms, live / _MIB)
        for ms, live in zip(
            times_ms(plan.schedule, costs), plan.simulation.live_bytes, strict=False
        )
    ]
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


def row_key(row: SweepRow) -> str:
    """The key that a mark, a row and a panel share.

    No element has it as its id: the page must not jump there.
    """
    return f"{row.strategy}-{row.budget_bytes}"


def peak_text(num_bytes: int | None) -> str:
    """A size; empty if unknown."""
    return "" if num_bytes is None else size_text(num_bytes)


def mebibytes(value: float) -> str:
    """The label of an axis in MiB."""
    return f"{value:,g} MiB"
