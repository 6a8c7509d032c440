"""The targets of plan quality: one row each, hit or missed.

Every target is set here, before anything is measured. A row without a measurement says so; it is
neither hit nor missed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from bench.command import Record
from bench.pages import Target, worst_row
from bench.quality.records import (
    ROUNDING,
    Records,
    chunked_gap,
    form_text,
    has_two_layers,
    key_of,
    percent,
    place,
)

LARGEST_GAP = 0.02
MEDIAN_GAP = 0.01
LEAST_BUDGET = 0.25
"""Smallest budget whose gap has a target, as a fraction of the baseline's peak."""
WHOLE_GRAPH_GAP = 0.01
SMALLEST_PEAK_OF_ROTOR = 0.7

SERIES = {
    "gpt2-deep": {0.48: 1.045, 0.28: 1.14, 0.18: 1.20, 0.12: 1.33},
    "bert-narrow": {0.49: 1.06, 0.31: 1.13, 0.17: 1.20, 0.10: 1.40},
    "llama": {0.48: 1.10, 0.33: 1.19, 0.25: 1.30},
}
"""Model to budget, as a fraction of the baseline's peak, to the target of its time ratio."""


def rows(records: Sequence[Record]) -> list[Target]:
    """All rows, in the order of the targets."""
    lines = Records(records)
    return [
        *_gap_rows(lines),
        _whole_graph_row(lines),
        *_series_rows(lines),
        *_soundness_rows(lines),
        *_smallest_peak_rows(lines),
        _strategy_row(lines),
    ]


def _every(what: str, holds: Sequence[tuple[str, bool]]) -> Target:
    """The row of a condition that has to hold everywhere."""
    failing = [name for name, hold in holds if not hold]
    figure = f"{len(holds) - len(failing)} of {len(holds)}" if holds else ""
    return Target(what, "always", figure, ", ".join(failing[:4]), not failing if holds else None)


def _gap_row(what: str, limit: float, gaps: Sequence[tuple[str, float]]) -> Target:
    """The row of the largest gap."""
    return worst_row(what, limit, gaps, reach=f"<= {100 * limit:g} %", show=percent, counts=True)


def _gap_rows(lines: Records) -> list[Target]:
    gaps = lines.gaps_of_models()
    largest = [
        (f"{model} at {budget:g}", gap)
        for model, own in gaps.items()
        for budget, gap in own.items()
    ]
    medians = [(model, statistics.median(own.values())) for model, own in gaps.items()]
    in_range = [record for record in lines.chunked if record["budget"] >= LEAST_BUDGET]
    chunked = [(f"{r['model']} at {r['budget']:g}", chunked_gap(r)) for r in in_range]
    num_infeasible = sum(len(lines.infeasible(model)) for model in gaps)
    left_out = f" ({num_infeasible} below the smallest peak left out)" if num_infeasible else ""
    what = f"gap to the lower bound, budgets from 1.0 to 0.25{left_out}: largest"
    series = "the same of the series below down to 0.25, only the loss returned: largest"
    return [
        _gap_row(what, LARGEST_GAP, largest),
        _gap_row("the same: median of a model", MEDIAN_GAP, medians),
        _gap_row(series, LARGEST_GAP, chunked),
    ]


def _whole_graph_row(lines: Records) -> Target:
    others = [r for r in lines.plans if r["strategy"] == "checkmate"]
    gaps = [
        (
            place(lines, other),
            (lines.own_ms(other) - other["ms"]) / lines.models[other["model"]]["baseline_ms"],
        )
        for other in others
        if other["is_feasible"] and other["is_proved"]
    ]
    num_unproved = sum(
        "why" in other or (other["is_feasible"] and not other["is_proved"]) for other in others
    )
    limits = {
        record.get("whole_graph_limit_s")
        for model, record in lines.models.items()
        if has_two_layers(model)
    } - {None}
    capped = "".join(f", {limit:g} s a solve of the 600 allowed" for limit in limits)
    unproved = f" ({num_unproved} not proved in that time, left out)" if num_unproved else ""
    optimum = "gap to whole-graph Checkmate's proved optimum, of schedules without in-place ops"
    what = f"{optimum}{capped}{unproved}"
    return _gap_row(what, WHOLE_GRAPH_GAP, gaps)


def _series_rows(lines: Records) -> list[Target]:
    """The series with the outputs returned, then with the loss alone."""
    whole = {(r["model"], r["budget"]): r for r in lines.plans if r["purpose"] == "series"}
    chunked = {(r["model"], r["budget"]): r for r in lines.chunked}
    goals = [
        ((model, budget), target)
        for model, targets in SERIES.items()
        for budget, target in targets.items()
    ]
    return [_series_row(*key, target, whole.get(key)) for key, target in goals] + [
        _chunked_row(*key, target, chunked.get(key)) for key, target in goals
    ]


def _series_row(model: str, budget: float, target: float, record: Record | None) -> Target:
    what, reach = f"{model} at {budget:g}: predicted time ratio", f"<= {target:g}"
    if record is None:
        return Target(what, reach)
    if not record["is_feasible"]:
        return Target(what, reach, "infeasible", is_hit=False)
    bound = record["ratio"] * record["lower_bound_ms"] / record["ms"]
    where = f"no schedule of this graph is below {bound:.3f}" + (
        ", so the target is out of reach" if bound > target else ""
    )
    return Target(what, reach, f"{record['ratio']:.3f}", where, record["ratio"] <= target)


def _chunked_row(model: str, budget: float, target: float, record: Record | None) -> Target:
    what = f"{model} at {budget:g}, only the loss returned, in chunks where that is faster"
    if record is None:
        return Target(what, f"<= {target:g}")
    bound = f"{record['lower_bound_ratio']:.3f}"
    where = f"{form_text(record)}; no considered graph has a schedule below {bound}"
    is_hit = record["ratio"] <= target and record["peak_bytes"] <= record["budget_bytes"]
    return Target(what, f"<= {target:g}", f"{record['ratio']:.3f}", where, is_hit)


def _soundness_rows(lines: Records) -> list[Target]:
    fits = [(place(lines, r), r["peak_bytes"] <= r["budget_bytes"]) for r in lines.feasible]
    bounded = [
        (place(lines, r), r["ms"] >= lines.bounds_ms[key_of(r)] * (1 - ROUNDING))
        for r in lines.feasible
        if key_of(r) in lines.bounds_ms
    ]
    monotone = [
        (f"{model} {strategy}", _is_monotone(points))
        for model, record in lines.models.items()
        for strategy, points in record.get("frontiers", {}).items()
    ]
    ours = {model: [r for r in lines.unchunked if r["model"] == model] for model in lines.models}
    planned = [(model, _times_fall(plans)) for model, plans in ours.items() if plans]
    all_ours = {model: [r for r in lines.ours if r["model"] == model] for model in lines.models}
    with_chunks = [(model, _times_fall(plans)) for model, plans in all_ours.items() if plans]
    return [
        _every("simulated peak <= budget, every plan", fits),
        _every("no schedule of any strategy beats the lower bound", bounded),
        _every("frontier: time falls as the budget grows", monotone),
        _every(
            "plans at all budgets tried, not in chunks: none slower than one for less memory",
            planned,
        ),
        _every("the same, those in chunks among them", with_chunks),
    ]


def _is_monotone(points: Sequence[Sequence[float]]) -> bool:
    return all(
        smaller[0] < larger[0] and smaller[1] > larger[1] for smaller, larger in pairwise(points)
    )


def _times_fall(plans: Iterable[Record]) -> bool:
    ordered = sorted(plans, key=lambda r: (r["budget_bytes"], -r["ms"]))
    return all(
        larger["ms"] <= smaller["ms"] * (1 + ROUNDING) for smaller, larger in pairwise(ordered)
    )


def _smallest_peak_rows(lines: Records) -> list[Target]:
    known = {
        model: record
        for model, record in lines.models.items()
        if "minimum_peak_bytes" in record and not has_two_layers(model)
    }

    def row(what: str, key: str) -> Target:
        shares = [(m, r[key]["rockmate"] / r[key]["rotor"]) for m, r in known.items()]
        limit = SMALLEST_PEAK_OF_ROTOR
        return worst_row(what, limit, shares, reach=f"<= {limit:g}", counts=True)

    unreachable = sum(
        r["proved_minimum_bytes"] > SMALLEST_PEAK_OF_ROTOR * r["minimum_peak_bytes"]["rotor"]
        for r in known.values()
    )
    peak = "smallest feasible peak, of Rotor's with all-or-nothing blocks"
    in_chunks = "the same where only the loss is returned and blocks may run in chunks"
    return [
        row(f"{peak} ({unreachable} models proved out of reach)", "minimum_peak_bytes"),
        row(in_chunks, "loss_only_minimum_bytes"),
    ]


def _strategy_row(lines: Records) -> Target:
    others = [r for r in lines.feasible if r["strategy"] != "rockmate"]
    slower = [
        (f"against {place(lines, other)}", lines.own_ms(other) / other["ms"] - 1)
        for other in others
    ]
    what = "time beyond another strategy's at the same budget"
    return worst_row(what, ROUNDING, slower, reach="<= 0", show=percent, counts=True)
