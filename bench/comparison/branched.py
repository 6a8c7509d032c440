"""The page of `bench.compare --branched`: models whose step is not a chain of blocks.

Targets are set here, before anything is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import peers
from bench.command import Record
from bench.comparison.page import gradients_text, number_text, ratio_text
from bench.comparison.result import OURS, ModelResult, Point
from bench.pages import (
    OURS_COLOR,
    PEER_COLOR,
    Column,
    Goal,
    Line,
    Start,
    filled,
    in_mb,
    judged,
    megabytes,
    picture,
    provenance,
    records_table,
    targets,
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


class Case(NamedTuple):
    """A model at a budget: the plan, None if infeasible, and what was measured of it."""

    result: ModelResult
    share: str
    plan: Record | None
    point: Point | None

    @property
    def planner(self) -> Record:
        """Planning times, and the size of the step."""
        return self.result.of("planner")[0]

    @property
    def is_timed(self) -> bool:
        """Whether its step was timed."""
        return self.point is not None and not math.isnan(self.point.ratio)


def _cases(result: ModelResult) -> list[Case]:
    """The model at each budget, then at the peaks of peers."""
    plans = {plan["method"].partition(": ")[2]: plan for plan in result.of("plan")}
    shares = dict.fromkeys((*SHARES, *plans))
    return [Case(result, s, plans.get(s), _point(result, f"{OURS}: {s}")) for s in shares]


def _point(result: ModelResult, method: str) -> Point | None:
    return next((point for point in result.points if point.method == method), None)


def _planning_s(result: ModelResult) -> float:
    """Seconds without the capture: op costs, solving, and the slowest budget."""
    timings = result.of("planner")[0]["timings_s"]
    slowest = max((plan["plan_s"] for plan in result.of("plan")), default=0.0)
    return timings["costs"] + timings["solve"] + slowest


def _share_of_checkpoint(result: ModelResult) -> float:
    """Our least measured peak over that of checkpoints; NaN if one is missing."""
    found = [point.peak_bytes for method in PEERS if (point := _point(result, method))]
    own = _point(result, f"{OURS}: {SMALLEST}")
    return own.peak_bytes / min(found) if found and own else math.nan


def page(results: Sequence[ModelResult]) -> list[str]:
    """The page's lines, for models with an eager point and a planner's record."""
    cases = [case for result in results for case in _cases(result)]
    return filled(
        "branched",
        headline=_headline([c for c in cases if c.share == HALF and c.is_timed]),
        targets=targets(judged(_GOALS, cases)),
        provenance=provenance(list(_starts(results))),
        models=records_table(_MODELS, results),
        budgets=records_table(_BUDGETS, [case for case in cases if case.share in SHARES]),
        failures=[
            f"- {r.name}: {failed['method']} **failed**: {failed['error']}"
            for r in results
            for failed in r.of("failed")
        ],
        measured=filled("measured"),
    )


def _headline(timed: Sequence[Case]) -> str:
    ratios = [(case.point.ratio, case.result.name) for case in timed if case.point]
    if not ratios:
        return ""
    (least, _), (most, name) = min(ratios), max(ratios)
    return (
        f"**At half of the activation peak, a step takes {least:.2f} to {most:.2f} times eager's "
        f"time on {len(ratios)} models; the largest is {name}.**"
    )


def _starts(results: Sequence[ModelResult]) -> Iterator[Start]:
    for result in results:
        for run in result.of("run"):
            options = run["options"]
            command = f"python -m bench.compare --branched --rounds {options['rounds']}"
            yield Start(
                model=result.name, command=command + " --tiny" * options["tiny"], machine=run
            )


# --- targets ----------------------------------------------------------------------------------


def _is_run(case: Any) -> bool:
    return case.plan and case.point


def _at(share: str, name: str = "") -> Callable[[Any], bool]:
    """Whether a case is of this budget, and of this model if one is named."""
    return lambda case: case.share == share and name in ("", case.result.name)


def _timed_at_half(name: str = "") -> Callable[[Any], bool]:
    return lambda case: _at(HALF, name)(case) and case.is_timed


def _planned_at_half(name: str = "") -> Callable[[Any], bool]:
    return lambda case: _at(HALF, name)(case) and case.plan


def _has_bound(case: Any) -> bool:
    """Whether the gap to the lower bound has a target."""
    least_bytes = int(GAP_DOWN_TO * case.planner["baseline_peak_bytes"])
    return case.share in SHARES and case.plan and case.plan["budget_bytes"] >= least_bytes


def _name(case: Any) -> str:
    return case.result.name


def _name_and_bound(case: Any) -> str:
    bound = case.plan["predicted_ratio"] - case.plan["optimality_gap"]
    return f"{_name(case)}, where no schedule is below {bound:.3f}"


_OVER_EAGER = "measured time there, over eager's"
_OVER_BASELINE = "predicted time there, over the baseline's"
_GOALS = (
    Goal("measured peak within the budget", None,
         lambda c: c.point.peak_bytes <= c.plan["budget_bytes"], _is_run),
    Goal("predicted peak within 2 % of the measured one", None,
         lambda c: (
             abs(c.plan["predicted_peak_bytes"] / c.point.peak_bytes - 1) <= PREDICTION_TOLERANCE
         ), _is_run),
    Goal(f"gradients equal eager's, relative {GRADIENT_TOLERANCE:g}", None,
         lambda c: c.point.gradient_difference <= GRADIENT_TOLERANCE, _is_run),
    Goal("half of the peak is feasible", None, lambda c: c.plan is not None, _at(HALF)),
    Goal(f"{_OVER_EAGER}: largest", TIME_AT_HALF, lambda c: c.point.ratio,
         _timed_at_half(), _name),
    Goal(f"{_OVER_EAGER}: U-Net", UNET_TIME_AT_HALF, lambda c: c.point.ratio,
         _timed_at_half(UNET), _name),
    Goal(f"{_OVER_BASELINE}: largest", TIME_AT_HALF, lambda c: c.plan["predicted_ratio"],
         _planned_at_half(), _name),
    Goal(f"{_OVER_BASELINE}: U-Net", UNET_TIME_AT_HALF, lambda c: c.plan["predicted_ratio"],
         _planned_at_half(UNET), _name_and_bound),
    Goal(f"gap to the bound down to {GAP_DOWN_TO}: largest", LARGEST_GAP,
         lambda c: c.plan["optimality_gap"], _has_bound, lambda c: f"{_name(c)}, {c.share}"),
    Goal("least peak, of that of checkpoints: largest", LEAST_PEAK,
         lambda c: _share_of_checkpoint(c.result),
         lambda c: _at(SMALLEST)(c) and not math.isnan(_share_of_checkpoint(c.result)), _name),
    Goal("planning without capture, in s: largest", PLANNING_S,
         lambda c: _planning_s(c.result), _at(SMALLEST), _name),
)  # fmt: skip


# --- tables -----------------------------------------------------------------------------------


def _sized(key: str) -> Callable[[ModelResult], str]:
    return lambda result: str(result.of("planner")[0][key])


def _measured(method: str, title: str, its: str) -> tuple[Column, Column]:
    """The peak and time of a method, empty without a point."""
    return (
        (title, lambda r: megabytes(p.peak_bytes) if (p := _point(r, method)) else ""),
        (its, lambda r: ratio_text(p) if (p := _point(r, method)) else ""),
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
    ("capture s", lambda r: f"{r.of('planner')[0]['timings_s']['capture']:.1f}"),
    ("planning s", lambda r: f"{_planning_s(r):.1f}"),
    *_measured(PEERS[0], "checkpoint MB", "its time"),
    *_measured(PEERS[1], "stages MB", "their time"),
    *_measured(f"{OURS}: {SMALLEST}", "our least MB", "our time"),
    ("share", lambda r: number_text(_share_of_checkpoint(r))),
)


def _from_plan(write: Callable[[Record], str]) -> Callable[[Case], str]:
    """A cell of a plan, empty if it is infeasible."""
    return lambda case: write(case.plan) if case.plan else ""


def _from_point(write: Callable[[Point], str], without: str = "") -> Callable[[Case], str]:
    """A cell of what was measured of a plan."""
    return lambda case: (write(case.point) if case.point else without) if case.plan else ""


def _budget_text(case: Case) -> str:
    least = megabytes(case.planner["minimum_peak_bytes"])
    plan = case.plan
    return megabytes(plan["budget_bytes"]) if plan else f"infeasible: the least peak is {least} MB"


_BUDGETS: tuple[Column, ...] = (
    ("model", _name),
    ("budget", lambda case: case.share),
    ("budget MB", _budget_text),
    ("predicted MB", _from_plan(in_mb("predicted_peak_bytes"))),
    ("measured MB", _from_point(lambda p: megabytes(p.peak_bytes), "failed")),
    ("resident MB", _from_point(lambda p: megabytes(p.resident_bytes))),
    ("predicted time", _from_plan("{predicted_ratio:.3f}".format_map)),
    ("measured time", _from_point(ratio_text)),
    (
        "gap",
        _from_plan(lambda p: f"{gap:.2%}" if math.isfinite(gap := p["optimality_gap"]) else ""),
    ),
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
    found = sorted(
        (
            (point.peak_bytes / eager.peak_bytes, plan, point)
            for _, share, plan, point in _cases(result)
            if share in SHARES and plan and point
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
        point = _point(result, method)
        style = {"color": PEER_COLOR, "marker": marker, "linestyle": "", "label": method}
        if point:
            lines.append(Line([(point.peak_bytes / eager.peak_bytes, point.ratio)], style))
    return f"{result.name}: {eager.peak_bytes / 1e6:.3g} MB, {eager.ms:.3g} ms", lines
