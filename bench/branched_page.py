"""The page and picture of `bench.branched`. Targets are set here, before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import peers
from bench.comparison.lines import Record
from bench.comparison.page import MEASURED, gradients_text, ratio_text
from bench.comparison.result import OURS, ModelResult, Point
from bench.pages import Start, all_row, megabytes, provenance, table, targets, worst_row
from bench.panels import figure_of

SHARES = ("1.0", "0.7", "0.5", "0.35", "minimum")
PEERS = ("checkpoint", peers.STAGES)
HALF, SMALLEST = "0.5", "minimum"
UNET = "unet"

TIME_AT_HALF = 1.10
"""Target of the time at half of the peak, over eager's or the baseline's."""

UNET_TIME_AT_HALF = 1.05
"""The same for the U-Net."""

LARGEST_GAP = 0.03
"""Target of the gap to the lower bound, at budgets of at least `GAP_DOWN_TO`."""

GAP_DOWN_TO = 0.35
PREDICTION_TOLERANCE = 0.02
GRADIENT_TOLERANCE = 1e-6
LEAST_PEAK = 0.8
"""Target of our least peak, as a share of the least of checkpoints."""

"""Target of the number of ops in a 0/1 program."""

PLANNING_S = 20.0
"""Target of planning time without the capture."""


def _planner(result: ModelResult) -> Record:
    return result.of("planner")[0]


def _plan(result: ModelResult, share: str) -> Record | None:
    return next((plan for plan in result.of("plan") if plan["method"] == f"{OURS}: {share}"), None)


def _peer(result: ModelResult, method: str) -> Point | None:
    return next((point for point in result.points if point.method == method), None)


def _point(result: ModelResult, share: str) -> Point | None:
    """Our point at a budget."""
    return _peer(result, f"{OURS}: {share}")


def _planning_s(result: ModelResult) -> float:
    """Seconds without the capture: op costs, solving, and the slowest budget."""
    timings = _planner(result)["timings_s"]
    return (
        timings["costs"]
        + timings["solve"]
        + max((plan["plan_s"] for plan in result.of("plan")), default=0.0)
    )


def _has_gap_target(result: ModelResult, plan: Record) -> bool:
    """Whether the budget is large enough for the target; some smallest peaks are."""
    return plan["budget_bytes"] >= int(GAP_DOWN_TO * _planner(result)["baseline_peak_bytes"])


def _bound_text(plan: Record) -> str:
    """The lower bound on a plan's time; a target below it is out of reach."""
    return f"where no schedule is below {plan['predicted_ratio'] - plan['optimality_gap']:.3f}"


def _least_of_checkpoints(result: ModelResult) -> Point | None:
    found = [point for method in PEERS if (point := _peer(result, method))]
    return min(found, key=lambda point: point.peak_bytes, default=None)


def _share_of_checkpoint(result: ModelResult) -> float:
    """Our least measured peak over that of checkpoints; NaN if one is missing."""
    peer, own = _least_of_checkpoints(result), _point(result, SMALLEST)
    return own.peak_bytes / peer.peak_bytes if peer and own else math.nan


def page(results: Sequence[ModelResult]) -> list[str]:
    """The page's lines, for models with an eager point and a planner's record."""
    return [
        "# Branched models, and chains beside them, on one CPU thread",
        "",
        *_headline(results),
        "",
        *targets([*_fit_rows(results), *_time_rows(results), *_planner_rows(results)]),
        "",
        *provenance(_starts(results)),
        "",
        *_structure(results),
        "",
        *_budgets(results),
        *_notes(results),
        "",
        "## How it was measured",
        "",
        f"{MEASURED} A budget is a share of the predicted peak of the baseline, the schedule "
        "without recomputation. The gap is the distance of the predicted time to the lower bound, "
        "over the baseline's time. MB are millions of bytes. `bench/models` has the models with "
        "their blocks and stages.",
    ]


def _headline(results: Sequence[ModelResult]) -> list[str]:
    ratios = [
        (point.ratio, result.name)
        for result in results
        if (point := _point(result, HALF)) and not math.isnan(point.ratio)
    ]
    text = "Models whose step is not a chain of blocks, planned at five budgets and run."
    if not ratios:
        return [text]
    (least, _), (most, name) = min(ratios), max(ratios)
    return [
        text,
        "",
        f"**At half of the activation peak, a step takes {least:.2f} to {most:.2f} times eager's "
        f"time on {len(ratios)} models; the largest is {name}.**",
    ]


def _starts(results: Iterable[ModelResult]) -> list[Start]:
    return [
        Start(model=result.name, command=_command(run["options"]), machine=run)
        for result in results
        for run in result.of("run")
    ]


def _command(options: Record) -> str:
    return f"python -m bench.branched --rounds {options['rounds']}{' --tiny' * options['tiny']}"


# --- targets ----------------------------------------------------------------------------------


def _fit_rows(results: Sequence[ModelResult]) -> list[list[str]]:
    """Rows of measured peaks and gradients."""
    pairs = [
        (point, plan)
        for result in results
        for plan in result.of("plan")
        for point in result.points
        if point.method == plan["method"]
    ]
    within = sum(point.peak_bytes <= plan["budget_bytes"] for point, plan in pairs)
    predicted = sum(
        abs(plan["predicted_peak_bytes"] / point.peak_bytes - 1) <= PREDICTION_TOLERANCE
        for point, plan in pairs
    )
    equal = sum(point.gradient_difference <= GRADIENT_TOLERANCE for point, _ in pairs)
    gradients = f"gradients equal eager's, relative {GRADIENT_TOLERANCE:g}"
    return [
        all_row("measured peak within the budget", within, len(pairs)),
        all_row("predicted peak within 2 % of the measured one", predicted, len(pairs)),
        all_row(gradients, equal, len(pairs)),
    ]


def _time_rows(results: Sequence[ModelResult]) -> list[list[str]]:
    """Rows of times at half of the peak."""
    plans = {result.name: plan for result in results if (plan := _plan(result, HALF))}
    timed = [
        (result.name, point.ratio)
        for result in results
        if (point := _point(result, HALF)) and not math.isnan(point.ratio)
    ]
    unet = [
        (f"{name}, {_bound_text(plan)}", plan["predicted_ratio"])
        for name, plan in plans.items()
        if name == UNET
    ]
    predicted = [(name, plan["predicted_ratio"]) for name, plan in plans.items()]
    timed_unet = [(name, ratio) for name, ratio in timed if name == UNET]
    over_baseline = "predicted time there, over the baseline's"
    return [
        all_row("half of the peak is feasible", len(plans), len(results)),
        worst_row("measured time there, over eager's: largest", TIME_AT_HALF, timed),
        worst_row("measured time there, over eager's: U-Net", UNET_TIME_AT_HALF, timed_unet),
        worst_row(f"{over_baseline}: largest", TIME_AT_HALF, predicted),
        worst_row(f"{over_baseline}: U-Net", UNET_TIME_AT_HALF, unet),
    ]


def _planner_rows(results: Sequence[ModelResult]) -> list[list[str]]:
    """Rows of gaps, smallest peaks and planning."""
    gaps = [
        (f"{result.name}, {share}", plan["optimality_gap"])
        for result in results
        for share in SHARES
        if (plan := _plan(result, share)) and _has_gap_target(result, plan)
    ]
    shares = [(r.name, share) for r in results if not math.isnan(share := _share_of_checkpoint(r))]
    planning = [(r.name, _planning_s(r)) for r in results]
    return [
        worst_row(f"gap to the bound down to {GAP_DOWN_TO}: largest", LARGEST_GAP, gaps),
        worst_row("least peak, of that of checkpoints: largest", LEAST_PEAK, shares),
        worst_row("planning without capture, in s: largest", PLANNING_S, planning),
    ]


# --- tables -----------------------------------------------------------------------------------

_SIZES = (
    "num_ops",
    "num_forward_ops",
    "num_blocks",
    "largest_block_ops",
    "largest_part_ops",
)


def _structure(results: Sequence[ModelResult]) -> list[str]:
    columns = (
        *("model", "eager MB", "eager ms", "ops", "forward ops", "blocks", "largest block"),
        *("largest part", "capture s", "planning s", "checkpoint MB"),
        *("its time", "stages MB", "their time", "our least MB", "our time", "share"),
    )
    return [
        "## Model by model",
        "",
        "The largest block is given in forward ops. The largest part is the number of forward ops "
        "in a knapsack whose choices depend on each other, over the whole graph or a span of "
        "blocks. An exact dynamic program solves a part; its size depends on the values that are "
        "live together, not on the ops. Planning is measuring op costs, solving, and the slowest "
        "budget.",
        "",
        *table(columns, map(_structure_row, results)),
    ]


def _structure_row(result: ModelResult) -> list[str]:
    eager, planner = result.eager, _planner(result)
    assert eager is not None
    cells = [result.name, megabytes(eager.peak_bytes), f"{eager.ms:.0f}"]
    cells += [str(planner[key]) for key in _SIZES]
    cells += [f"{planner['timings_s']['capture']:.1f}", f"{_planning_s(result):.1f}"]
    for point in (*(_peer(result, name) for name in PEERS), _point(result, SMALLEST)):
        cells += [megabytes(point.peak_bytes), ratio_text(point)] if point else ["", ""]
    share = _share_of_checkpoint(result)
    return [*cells, "" if math.isnan(share) else f"{share:.3f}"]


def _budgets(results: Sequence[ModelResult]) -> list[str]:
    columns = (
        *("model", "budget", "budget MB", "predicted MB", "measured MB", "resident MB"),
        *("predicted time", "measured time", "gap", "gradients", "plan s"),
    )
    rows = [_budget_row(result, share) for result in results for share in SHARES]
    return ["## Budgets", "", *table(columns, rows)]


def _budget_row(result: ModelResult, share: str) -> list[str]:
    plan, point = _plan(result, share), _point(result, share)
    if plan is None:
        least = megabytes(_planner(result)["minimum_peak_bytes"])
        return [result.name, share, f"infeasible: the least peak is {least} MB", *[""] * 8]
    measured = ["failed", "", "", ""]
    if point:
        sizes = [megabytes(point.peak_bytes), megabytes(point.resident_bytes)]
        measured = [*sizes, ratio_text(point), gradients_text(point)]
    gap = plan["optimality_gap"]
    return [
        *(result.name, share),
        *(megabytes(plan["budget_bytes"]), megabytes(plan["predicted_peak_bytes"])),
        *measured[:2],
        *(f"{plan['predicted_ratio']:.3f}", measured[2]),
        f"{gap:.2%}" if math.isfinite(gap) else "",
        *(measured[3], f"{plan['plan_s']:.1f}"),
    ]


def _notes(results: Sequence[ModelResult]) -> list[str]:
    failed_methods = [
        f"- {r.name}: {failed['method']} **failed**: {failed['error']}"
        for r in results
        for failed in r.of("failed")
    ]
    return ["", *failed_methods] if failed_methods else []


def save_picture(results: Sequence[ModelResult], path: Path) -> None:
    """Draws one panel for each model; needs matplotlib."""
    figure, panels = figure_of(len(results), columns=4, width=3.6, height=2.8)
    for result, panel in zip(results, panels, strict=True):
        _draw(result, panel)
    panels[0].legend(frameon=False, fontsize=7)
    figure.supxlabel("measured activation peak, as a share of eager's")
    figure.supylabel("time of a step over eager's")
    figure.savefig(path, dpi=110)


def _draw(result: ModelResult, panel: Any) -> None:
    eager = result.eager
    assert eager is not None
    pairs = [(_plan(result, share), _point(result, share)) for share in SHARES]
    found = [
        (point.peak_bytes / eager.peak_bytes, plan, point)
        for plan, point in pairs
        if plan and point
    ]
    found.sort(key=lambda item: item[0])
    xs = [x for x, _, _ in found]
    predicted = [plan["predicted_ratio"] for _, plan, _ in found]
    panel.plot(
        xs,
        [point.ratio for _, _, point in found],
        ".-",
        color="#1f6fb4",
        linewidth=1.6,
        label="ours, measured",
    )
    panel.plot(xs, predicted, "--", color="#1f6fb4", linewidth=1.0, label="ours, predicted")
    bounds = [
        ratio - plan["optimality_gap"] for ratio, (_, plan, _) in zip(predicted, found, strict=True)
    ]
    panel.plot(xs, bounds, ":", color="#6b7280", linewidth=1.0, label="lower bound, predicted")
    for method, marker in zip(PEERS, "os", strict=True):
        point = _peer(result, method)
        if point:
            panel.plot(
                [point.peak_bytes / eager.peak_bytes],
                [point.ratio],
                marker,
                color="#c8322b",
                markerfacecolor="none",
                label=method,
            )
    ratios = [point.ratio for _, _, point in found if not math.isnan(point.ratio)]
    panel.set_xlim(0, 1.08)
    panel.set_ylim(0.9, max([1.4, *ratios]) * 1.05)
    panel.set_title(
        f"{result.name}: {eager.peak_bytes / 1e6:.3g} MB, {eager.ms:.3g} ms", fontsize=9
    )
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#e4e6ea", linewidth=0.8)
