"""The page of plan quality: the headline, the targets, the models, the notes, the pictures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from bench.command import Record
from bench.pages import INK, PEER_COLOR, STRATEGIES, Line, about, filled, picture
from bench.quality.records import ROUNDING, Records, chunked_gap, percent, place
from bench.quality.targets import LARGEST_GAP, LEAST_BUDGET, facts


def page(records: Sequence[Record]) -> list[str]:
    """The page's lines."""
    lines = Records(records)
    gaps = [gap for own in lines.gaps_of_models().values() for gap in own.values()]
    in_range = [r for r in lines.chunked if r["budget"] >= LEAST_BUDGET]
    return filled(
        "plan_quality",
        is_tiny=records[0]["tiny"],
        gaps=gaps,
        median=statistics.median(gaps) if gaps else None,
        facts=facts(lines),
        provenance=about(records),
        models=[_model(lines, name) for name in lines.models],
        records=lines,
        largest_gap=LARGEST_GAP,
        loose=[r for r in lines.ours if r["purpose"] == "budget" and r["gap"] > LARGEST_GAP],
        loose_in_chunks=[r for r in in_range if chunked_gap(r) > LARGEST_GAP],
        rising=_rising_notes(lines),
    )


def _model(lines: Records, name: str) -> Record:
    """The row of a model; without what its record lacks."""
    record, gaps = lines.models[name], lines.gaps(name)
    at = max(gaps, key=lambda budget: gaps[budget], default=None)
    row = {
        "name": name,
        **{key: record[key] for key in ("num_ops", "baseline_peak_bytes", "baseline_ms")},
        "gap": None if at is None else gaps[at],
        "gap_at": at,
        "gap_median": statistics.median(gaps.values()) if gaps else None,
        "infeasible": ", ".join(f"{each:g}" for each in lines.infeasible(name)),
    }
    if "minimum_peak_bytes" not in record:
        return row
    least, chunked = record["minimum_peak_bytes"], record["loss_only_minimum_bytes"]
    return row | {
        "smallest": least["rockmate"] / record["baseline_peak_bytes"],
        "proved": record["proved_minimum_bytes"] / record["baseline_peak_bytes"],
        "of_rotor": least["rockmate"] / least["rotor"],
        "in_chunks": chunked["rockmate"] / chunked["rotor"],
    }


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
        title,
        lines,
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
