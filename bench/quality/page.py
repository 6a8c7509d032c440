"""The page of plan quality: the headline, the targets, the models, the notes, the pictures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from bench.command import Record
from bench.pages import (
    INK,
    PEER_COLOR,
    STRATEGIES,
    Column,
    Line,
    Start,
    filled,
    picture,
    provenance,
    records_table,
    targets,
)
from bench.quality.records import (
    ROUNDING,
    Records,
    chunked_gap,
    form_text,
    percent,
    place,
)
from bench.quality.targets import LARGEST_GAP, LEAST_BUDGET, rows


def page(records: Sequence[Record]) -> list[str]:
    """The page's lines."""
    lines = Records(records)
    gaps = [gap for own in lines.gaps_of_models().values() for gap in own.values()]
    return filled(
        "plan_quality",
        subject="Plans of tiny models beside a lower bound: a rehearsal."
        if records[0]["tiny"]
        else "Plans beside a lower bound that no schedule beats, with measured op times.",
        headline=_headline(gaps) if gaps else "",
        targets=targets(rows(records)),
        provenance=provenance(
            [Start(model=r["model"], command=r["command"], machine=r) for r in records]
        ),
        models=records_table(_COLUMNS, [(lines, model) for model in lines.models]),
        largest_gap=LARGEST_GAP,
        loose=_gap_notes(lines),
        rising=_rising_notes(lines),
        unsolved=_unsolved_notes(lines),
    )


def _headline(gaps: Sequence[float]) -> str:
    num_near = sum(gap <= LARGEST_GAP for gap in gaps)
    return (
        f"**{num_near} of {len(gaps)} plans are within {100 * LARGEST_GAP:g} % of the lower bound; "
        f"the median gap is {percent(statistics.median(gaps))} of a step.**"
    )


_Pair = tuple[Records, str]


def _of_record(write: Callable[[Record], str], key: str = "model") -> Callable[[_Pair], str]:
    """A cell of a model's record, empty without this field."""
    return lambda pair: write(record) if key in (record := pair[0].models[pair[1]]) else ""


def _of_gaps(write: Callable[[dict[float, float]], str]) -> Callable[[_Pair], str]:
    return lambda pair: write(gaps) if (gaps := pair[0].gaps(pair[1])) else ""


def _peak(write: Callable[[Record], float]) -> Callable[[_Pair], str]:
    return _of_record(lambda record: f"{write(record):.3f}", "minimum_peak_bytes")


def _of_rotor(key: str) -> Callable[[_Pair], str]:
    return _peak(lambda record: record[key]["rockmate"] / record[key]["rotor"])


_COLUMNS: tuple[Column, ...] = (
    ("model", lambda pair: pair[1]),
    ("ops", _of_record("{num_ops}".format_map)),
    ("baseline MB", _of_record(lambda r: f"{r['baseline_peak_bytes'] / 1e6:.1f}")),
    ("baseline ms", _of_record("{baseline_ms:.0f}".format_map)),
    ("gap, largest", _of_gaps(lambda gaps: percent(max(gaps.values())))),
    ("at", _of_gaps(lambda gaps: f"{max(gaps, key=lambda budget: gaps[budget]):g}")),
    ("gap, median", _of_gaps(lambda gaps: percent(statistics.median(gaps.values())))),
    ("infeasible", lambda pair: ", ".join(f"{each:g}" for each in pair[0].infeasible(pair[1]))),
    (
        "smallest peak",
        _peak(lambda r: r["minimum_peak_bytes"]["rockmate"] / r["baseline_peak_bytes"]),
    ),
    ("proved", _peak(lambda r: r["proved_minimum_bytes"] / r["baseline_peak_bytes"])),
    ("of Rotor's", _of_rotor("minimum_peak_bytes")),
    ("of Rotor's, in chunks", _of_rotor("loss_only_minimum_bytes")),
)


# --- notes ------------------------------------------------------------------------------------


def _unsolved_notes(lines: Records) -> list[str]:
    """What solvers have no answer for."""
    found = [
        f"- {r['model']}, {r['strategy']} at {r['budget']:g}: {r['why']}"
        for r in lines.plans
        if "why" in r
    ]
    return ["## What solvers have no answer for", "", *found] if found else []


def _gap_notes(lines: Records) -> list[str]:
    budgets = [r for r in lines.ours if r["purpose"] == "budget" and r["gap"] > LARGEST_GAP]
    series = [r for r in lines.chunked if r["budget"] >= LEAST_BUDGET]
    loose = [r for r in series if chunked_gap(r) > LARGEST_GAP]
    return [*(_loose_note(lines, r) for r in budgets), *map(_chunked_note, loose)]


def _rising_notes(lines: Records) -> list[str]:
    """Plans that are slower than another one with less memory."""
    found = []
    for model in lines.models:
        own = [r for r in lines.unchunked if r["model"] == model]
        plans = sorted(own, key=lambda r: (r["budget_bytes"], -r["ms"]))
        for smaller, larger in pairwise(plans):
            if larger["ms"] > smaller["ms"] * (1 + ROUNDING):
                beyond = percent(larger["ms"] / smaller["ms"] - 1)
                share = place(lines, smaller).rpartition(" ")[2]
                found.append(f"- {place(lines, larger)}: the plan at {share} is {beyond} faster.")
    return found


_LEAST_BOUND = "the bound is the least of those of all chunkings that were considered"


def _loose_note(lines: Records, record: Record) -> str:
    """A plan with a large gap, and its budget beside the smallest peaks."""
    model = lines.models[record["model"]]
    head = f"- {record['model']} at {record['budget']:g}: {percent(record['gap'])}"
    if record["chunks"]:
        return (
            f"{head}, in chunks ({record['chunks']}), since no other plan is known to fit there; "
            f"{_LEAST_BOUND}."
        )
    known = record["budget_bytes"] / model["minimum_peak_bytes"]["rockmate"]
    proved = record["budget_bytes"] / model["proved_minimum_bytes"]
    return (
        f"{head}; the budget is {known:.2f} times the smallest known peak, {proved:.2f} times the "
        "proved one."
    )


def _chunked_note(record: Record) -> str:
    """A plan of the series with a large gap, only the loss returned."""
    head = f"- {record['model']} at {record['budget']:g}, only the loss returned"
    return f"{head}: {percent(chunked_gap(record))}, {form_text(record)}; {_LEAST_BOUND}."


# --- picture ----------------------------------------------------------------------------------


def save_picture(records: Sequence[Record], path: Path) -> None:
    """Draws the frontier of each strategy on one model, with the lower bound.

    A strategy's curve is a step function: the time at a budget is that of its fastest plan for no
    more. So is the bound's: it holds for every smaller budget.

    Args:
        records: Of one model, the one of kind `model` first; see `bench.quality`.
        path: A file name that ends in .png, .pdf or .svg.
    """
    model, plans = records[0], [r for r in records if r["kind"] == "plan" and r["is_feasible"]]
    lines = []
    for strategy, color in (STRATEGIES | {"none": INK}).items():
        curve = _scaled(_frontier(model, plans, strategy), model)
        if curve:
            style = {"color": color, "label": strategy, "marker": "."}
            lines.append(Line([*curve, (1.05, curve[-1][1])], style, step="post"))
    bound = {"color": PEER_COLOR, "linestyle": "--", "label": "lower bound"}
    lines.append(Line(_scaled(model["lower_bounds"], model), bound, step="pre"))
    megabytes = model["baseline_peak_bytes"] / 1e6
    title = f"{model['model']}: baseline {megabytes:.4g} MB and {model['baseline_ms']:.4g} ms"
    picture(
        path,
        {title: lines},
        across="peak, as a share of the baseline's",
        up="predicted time over the baseline's",
        limits=(0.98, 2.0),
    )


def _frontier(model: Record, plans: Sequence[Record], strategy: str) -> list[tuple[float, float]]:
    """The strategy's points that no other one dominates."""
    points = {(budget_bytes, ms) for budget_bytes, ms in model["frontiers"].get(strategy, ())}
    points |= {(r["peak_bytes"], r["ms"]) for r in plans if r["strategy"] == strategy}
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def _scaled(points: Sequence[Sequence[float]], model: Record) -> list[tuple[float, float]]:
    """Share of the peak and time ratio."""
    return [(size / model["baseline_peak_bytes"], ms / model["baseline_ms"]) for size, ms in points]
