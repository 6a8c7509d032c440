"""The targets of plan quality: one row each, hit or missed.

Every target is set here, before anything is measured. A row without a measurement says so; it is
neither hit nor missed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.command import Record
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One target with its figure.

    Attributes:
        what: The quantity.
        reach: Its target.
        figure: The measured value, empty if nothing was measured.
        where: Model and budget of the figure, and the number of others.
        is_hit: None if nothing was measured.
    """

    what: str
    reach: str
    figure: str = ""
    where: str = ""
    is_hit: bool | None = None

    @property
    def cells(self) -> list[str]:
        """The row of the page's table."""
        verdict = {None: "not measured", True: "hit", False: "**miss**"}[self.is_hit]
        return [self.what, self.reach, self.figure, self.where, verdict]


def rows(records: Sequence[Record]) -> list[Row]:
    """All rows, in the order of the targets."""
    lines = Records(records)
    return [
        *_gap_rows(lines),
        _whole_graph_row(lines),
        *_series_rows(lines),
        *_chunked_rows(lines),
        *_soundness_rows(lines),
        *_smallest_peak_rows(lines),
        _strategy_row(lines),
    ]


def _worst(
    what: str,
    reach: str,
    figures: Sequence[tuple[str, float]],
    limit: float,
    show: Callable[[float], str],
) -> Row:
    """The row of the largest figure: every figure has to be at most `limit`."""
    if not figures:
        return Row(what=what, reach=reach)
    name, worst = max(figures, key=lambda pair: pair[1])
    num_within = sum(figure <= limit for _, figure in figures)
    where = f"{name}; {num_within} of {len(figures)} within"
    return Row(
        what=what, reach=reach, figure=show(worst), where=where, is_hit=num_within == len(figures)
    )


def _every(what: str, holds: Sequence[tuple[str, bool]]) -> Row:
    """The row of a condition that has to hold everywhere."""
    if not holds:
        return Row(what=what, reach="always")
    failing = [name for name, hold in holds if not hold]
    figure = f"{len(holds) - len(failing)} of {len(holds)}"
    return Row(
        what=what, reach="always", figure=figure, where=", ".join(failing[:4]), is_hit=not failing
    )


def _gap_rows(lines: Records) -> list[Row]:
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
    return [
        _worst(
            f"gap to the lower bound, budgets from 1.0 to 0.25{left_out}: largest",
            "<= 2 %",
            largest,
            LARGEST_GAP,
            percent,
        ),
        _worst("the same: median of a model", "<= 1 %", medians, MEDIAN_GAP, percent),
        _worst(
            "the same of the series below down to 0.25, only the loss returned: largest",
            "<= 2 %",
            chunked,
            LARGEST_GAP,
            percent,
        ),
    ]


def _whole_graph_row(lines: Records) -> Row:
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
    return _worst(what, "<= 1 %", gaps, WHOLE_GRAPH_GAP, percent)


def _series_rows(lines: Records) -> list[Row]:
    found = {(r["model"], r["budget"]): r for r in lines.plans if r["purpose"] == "series"}
    return [
        _series_row(
            f"{model} at {budget:g}: predicted time ratio", target, found.get((model, budget))
        )
        for model, targets in SERIES.items()
        for budget, target in targets.items()
    ]


def _series_row(what: str, target: float, record: Record | None) -> Row:
    reach = f"<= {target:g}"
    if record is None:
        return Row(what=what, reach=reach)
    if not record["is_feasible"]:
        return Row(what=what, reach=reach, figure="infeasible", is_hit=False)
    bound = record["ratio"] * record["lower_bound_ms"] / record["ms"]
    where = f"no schedule of this graph is below {bound:.3f}" + (
        ", so the target is out of reach" if bound > target else ""
    )
    return Row(
        what=what,
        reach=reach,
        figure=f"{record['ratio']:.3f}",
        where=where,
        is_hit=record["ratio"] <= target,
    )


def _chunked_rows(lines: Records) -> list[Row]:
    found = {(r["model"], r["budget"]): r for r in lines.chunked}
    return [
        _chunked_row(
            f"{model} at {budget:g}, only the loss returned, in chunks where that is faster",
            target,
            found.get((model, budget)),
        )
        for model, targets in SERIES.items()
        for budget, target in targets.items()
    ]


def _chunked_row(what: str, target: float, record: Record | None) -> Row:
    reach = f"<= {target:g}"
    if record is None:
        return Row(what=what, reach=reach)
    bound = f"{record['lower_bound_ratio']:.3f}"
    where = f"{form_text(record)}; no considered graph has a schedule below {bound}"
    is_hit = record["ratio"] <= target and record["peak_bytes"] <= record["budget_bytes"]
    return Row(what=what, reach=reach, figure=f"{record['ratio']:.3f}", where=where, is_hit=is_hit)


def _soundness_rows(lines: Records) -> list[Row]:
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


def _smallest_peak_rows(lines: Records) -> list[Row]:
    known = {
        model: record
        for model, record in lines.models.items()
        if "minimum_peak_bytes" in record and not has_two_layers(model)
    }

    def row(what: str, key: str) -> Row:
        shares = [(m, r[key]["rockmate"] / r[key]["rotor"]) for m, r in known.items()]
        return _worst(what, "<= 0.7", shares, SMALLEST_PEAK_OF_ROTOR, "{:.3f}".format)

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


def _strategy_row(lines: Records) -> Row:
    others = [r for r in lines.feasible if r["strategy"] != "rockmate"]
    slower = [
        (f"against {place(lines, other)}", lines.own_ms(other) / other["ms"] - 1)
        for other in others
    ]
    return _worst(
        "time beyond another strategy's at the same budget", "<= 0", slower, ROUNDING, percent
    )
