"""The page of `bench.compare --branched`: models whose step is not a chain of blocks.

Targets are set here, before anything is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import peers
from bench.command import Record
from bench.comparison.page import MEASURED, gradients_text, ratio_text
from bench.comparison.result import OURS, ModelResult, Point
from bench.pages import (
    OURS_COLOR,
    PEER_COLOR,
    Column,
    Line,
    Start,
    all_row,
    in_mb,
    megabytes,
    picture,
    provenance,
    records_table,
    targets,
    worst_row,
)

CHAINS = ("gpt2-12", "llama", "resnet50")
SHARES = ("1.0", "0.7", "0.5", "0.35", "minimum")
PEERS = ("checkpoint", peers.STAGES)
HALF, SMALLEST, UNET = "0.5", "minimum", "unet"
TIME_AT_HALF, UNET_TIME_AT_HALF = 1.10, 1.05
"""Targets of the time at half of the peak, over eager's or the baseline's."""
LARGEST_GAP, GAP_DOWN_TO = 0.03, 0.35
"""Target of the gap to the lower bound, and the least budget that it is for."""
PREDICTION_TOLERANCE, GRADIENT_TOLERANCE = 0.02, 1e-6
LEAST_PEAK = 0.8
"""Target of our least peak, as a share of the least of checkpoints."""
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
    slowest = max((plan["plan_s"] for plan in result.of("plan")), default=0.0)
    return timings["costs"] + timings["solve"] + slowest


def _share_of_checkpoint(result: ModelResult) -> float:
    """Our least measured peak over that of checkpoints; NaN if one is missing."""
    found = [point.peak_bytes for method in PEERS if (point := _peer(result, method))]
    own = _point(result, SMALLEST)
    return own.peak_bytes / min(found) if found and own else math.nan


def page(results: Sequence[ModelResult]) -> list[str]:
    """The page's lines, for models with an eager point and a planner's record."""
    return [
        "# Branched models, and chains beside them, on one CPU thread",
        "",
        *_headline(results),
        "",
        *targets([*_fit_rows(results), *_time_rows(results), *_planner_rows(results)]),
        "",
        *provenance(list(_starts(results))),
        "",
        "## Model by model",
        "",
        "The largest block is given in forward ops. The largest part is the number of forward ops "
        "in a knapsack whose choices depend on each other, over the whole graph or a span of "
        "blocks. An exact dynamic program solves a part; its size depends on the values that are "
        "live together, not on the ops. Planning is measuring op costs, solving, and the slowest "
        "budget.",
        "",
        *records_table(_MODELS, results),
        "",
        "## Budgets",
        "",
        *records_table(_BUDGETS, [(result, share) for result in results for share in SHARES]),
        *_failures(results),
        "",
        "## How it was measured",
        "",
        f"{MEASURED} A budget is a share of the predicted peak of the baseline, the schedule "
        "without recomputation. The gap is the distance of the predicted time to the lower bound, "
        "over the baseline's time. MB are millions of bytes. `bench/models` has the models with "
        "their blocks and stages.",
    ]


def _headline(results: Sequence[ModelResult]) -> list[str]:
    ratios = [(ratio, name) for name, ratio in _timed_at_half(results)]
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


def _timed_at_half(results: Sequence[ModelResult]) -> list[tuple[str, float]]:
    points = [(result.name, _point(result, HALF)) for result in results]
    return [(name, p.ratio) for name, p in points if p and not math.isnan(p.ratio)]


def _starts(results: Sequence[ModelResult]) -> Iterator[Start]:
    for result in results:
        for run in result.of("run"):
            options = run["options"]
            command = f"python -m bench.compare --branched --rounds {options['rounds']}"
            yield Start(
                model=result.name, command=command + " --tiny" * options["tiny"], machine=run
            )


def _failures(results: Sequence[ModelResult]) -> list[str]:
    lines = [
        f"- {r.name}: {failed['method']} **failed**: {failed['error']}"
        for r in results
        for failed in r.of("failed")
    ]
    return ["", *lines] if lines else []


# --- targets ----------------------------------------------------------------------------------


def _fit_rows(results: Sequence[ModelResult]) -> list[list[str]]:
    """Rows of measured peaks and gradients."""
    pairs = [
        (point, plan)
        for result in results
        for plan in result.of("plan")
        if (point := _peer(result, plan["method"]))
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
    timed = _timed_at_half(results)
    unet = [
        (
            f"{name}, where no schedule is below "
            f"{plan['predicted_ratio'] - plan['optimality_gap']:.3f}",
            plan["predicted_ratio"],
        )
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
        if (plan := _plan(result, share))
        and plan["budget_bytes"] >= int(GAP_DOWN_TO * _planner(result)["baseline_peak_bytes"])
    ]
    shares = [(r.name, share) for r in results if not math.isnan(share := _share_of_checkpoint(r))]
    planning = [(r.name, _planning_s(r)) for r in results]
    return [
        worst_row(f"gap to the bound down to {GAP_DOWN_TO}: largest", LARGEST_GAP, gaps),
        worst_row("least peak, of that of checkpoints: largest", LEAST_PEAK, shares),
        worst_row("planning without capture, in s: largest", PLANNING_S, planning),
    ]


# --- tables -----------------------------------------------------------------------------------


def _sized(key: str) -> Callable[[ModelResult], str]:
    return lambda result: str(_planner(result)[key])


def _measured(
    find: Callable[[ModelResult], Point | None], title: str, its: str
) -> tuple[Column, Column]:
    """The peak and time of a point, empty without one."""
    return (
        (title, lambda r: megabytes(p.peak_bytes) if (p := find(r)) else ""),
        (its, lambda r: ratio_text(p) if (p := find(r)) else ""),
    )


_MODELS: tuple[Column, ...] = (
    ("model", lambda r: r.name),
    ("eager MB", lambda r: megabytes(r.eager.peak_bytes)),
    ("eager ms", lambda r: f"{r.eager.ms:.0f}"),
    ("ops", _sized("num_ops")),
    ("forward ops", _sized("num_forward_ops")),
    ("blocks", _sized("num_blocks")),
    ("largest block", _sized("largest_block_ops")),
    ("largest part", _sized("largest_part_ops")),
    ("capture s", lambda r: f"{_planner(r)['timings_s']['capture']:.1f}"),
    ("planning s", lambda r: f"{_planning_s(r):.1f}"),
    *_measured(lambda r: _peer(r, PEERS[0]), "checkpoint MB", "its time"),
    *_measured(lambda r: _peer(r, PEERS[1]), "stages MB", "their time"),
    *_measured(lambda r: _point(r, SMALLEST), "our least MB", "our time"),
    ("share", lambda r: "" if math.isnan(share := _share_of_checkpoint(r)) else f"{share:.3f}"),
)
_Pair = tuple[ModelResult, str]


def _from_plan(write: Callable[[Record], str]) -> Callable[[_Pair], str]:
    """A cell of a model's plan at a budget, empty if it is infeasible."""
    return lambda pair: write(plan) if (plan := _plan(*pair)) else ""


def _from_point(write: Callable[[Point], str], without: str = "") -> Callable[[_Pair], str]:
    """A cell of what was measured there."""
    return lambda pair: (
        (write(point) if (point := _point(*pair)) else without) if _plan(*pair) else ""
    )


def _budget_text(pair: _Pair) -> str:
    plan = _plan(*pair)
    least = megabytes(_planner(pair[0])["minimum_peak_bytes"])
    return megabytes(plan["budget_bytes"]) if plan else f"infeasible: the least peak is {least} MB"


def _gap_text(plan: Record) -> str:
    gap = plan["optimality_gap"]
    return f"{gap:.2%}" if math.isfinite(gap) else ""


_BUDGETS: tuple[Column, ...] = (
    ("model", lambda pair: pair[0].name),
    ("budget", lambda pair: pair[1]),
    ("budget MB", _budget_text),
    ("predicted MB", _from_plan(in_mb("predicted_peak_bytes"))),
    ("measured MB", _from_point(lambda p: megabytes(p.peak_bytes), "failed")),
    ("resident MB", _from_point(lambda p: megabytes(p.resident_bytes))),
    ("predicted time", _from_plan("{predicted_ratio:.3f}".format_map)),
    ("measured time", _from_point(ratio_text)),
    ("gap", _from_plan(_gap_text)),
    ("gradients", _from_point(gradients_text)),
    ("plan s", _from_plan("{plan_s:.1f}".format_map)),
)


# --- picture ----------------------------------------------------------------------------------


def save_picture(results: Sequence[ModelResult], path: Path) -> None:
    """Draws one panel for each model."""
    picture(
        path,
        dict(map(_panel, results)),
        across="measured activation peak, as a share of eager's",
        up="time of a step over eager's",
        limits=(0.9, None),
        columns=4,
        size=(3.6, 2.8),
    )


def _panel(result: ModelResult) -> tuple[str, list[Line]]:
    eager = result.eager
    assert eager is not None
    pairs = [(_plan(result, share), _point(result, share)) for share in SHARES]
    found = sorted(
        (
            (point.peak_bytes / eager.peak_bytes, plan, point)
            for plan, point in pairs
            if plan and point
        ),
        key=lambda item: item[0],
    )

    def line(height: Callable[[Record, Point], float], **style: Any) -> Line:
        return Line([(x, height(plan, point)) for x, plan, point in found], style)

    lines = [
        line(lambda _, point: point.ratio, color=OURS_COLOR, marker=".", label="ours, measured"),
        line(lambda plan, _: plan["predicted_ratio"], color=OURS_COLOR, linestyle="--",
             label="ours, predicted"),
        line(lambda plan, _: plan["predicted_ratio"] - plan["optimality_gap"], color="#6b7280",
             linestyle=":", label="lower bound, predicted"),
    ]  # fmt: skip
    for method, marker in zip(PEERS, "os", strict=True):
        point = _peer(result, method)
        style = {"color": PEER_COLOR, "marker": marker, "linestyle": "", "label": method}
        if point:
            lines.append(Line([(point.peak_bytes / eager.peak_bytes, point.ratio)], style))
    return f"{result.name}: {eager.peak_bytes / 1e6:.3g} MB, {eager.ms:.3g} ms", lines
