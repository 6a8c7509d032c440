"""What the targets of plan quality are judged by; the targets are in the template of its page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from bench.command import Record
from bench.quality.records import ROUNDING, Records, key_of, place

LARGEST_GAP = 0.02
LEAST_BUDGET = 0.25
"""Smallest budget whose gap has a target, as a fraction of the baseline's peak."""

SERIES = {
    "gpt2-deep": {0.48: 1.045, 0.28: 1.14, 0.18: 1.20, 0.12: 1.33},
    "bert-narrow": {0.49: 1.06, 0.31: 1.13, 0.17: 1.20, 0.10: 1.40},
    "llama": {0.48: 1.10, 0.33: 1.19, 0.25: 1.30},
}
"""Model to budget, as a fraction of the baseline's peak, to the target of its time ratio."""


def facts(lines: Records) -> dict[str, Any]:
    """What the template reads, by name."""
    gaps = lines.gaps_of_models()
    feasible = [
        {**r, "place": place(lines, r), "bound_ms": lines.bounds_ms.get(key_of(r))}
        for r in lines.feasible
    ]
    others = [r for r in feasible if r["strategy"] != "rockmate"]
    return {
        "gaps": [
            {"model": model, "budget": budget, "gap": gap}
            for model, own in gaps.items()
            for budget, gap in own.items()
        ],
        "medians": [
            {"model": name, "gap": statistics.median(own.values())} for name, own in gaps.items()
        ],
        "num_infeasible": sum(len(lines.infeasible(model)) for model in gaps),
        "series": [r for r in lines.chunked if r["budget"] >= LEAST_BUDGET],
        "goals": _goals(lines),
        "feasible": feasible,
        "frontiers": [
            {"place": f"{model} {strategy}", "holds": _is_monotone(points)}
            for model, record in lines.models.items()
            for strategy, points in record.get("frontiers", {}).items()
        ],
        "unchunked": _falling(lines, lines.unchunked),
        "all": _falling(lines, lines.ours),
        "known": [
            record for model, record in lines.models.items() if "minimum_peak_bytes" in record
        ],
        "others": [{**r, "own_ms": lines.own_ms(r)} for r in others],
    }


def _goals(lines: Records) -> Sequence[tuple[Any, ...]]:
    """Model, budget and target of the series, with the outputs returned and with the loss alone."""
    whole = {(r["model"], r["budget"]): r for r in lines.plans if r["purpose"] == "series"}
    chunked = {(r["model"], r["budget"]): r for r in lines.chunked}
    return tuple(
        (model, budget, target, whole.get((model, budget)), chunked.get((model, budget)))
        for model, targets in SERIES.items()
        for budget, target in targets.items()
    )


def _is_monotone(points: Sequence[Sequence[float]]) -> bool:
    return all(
        smaller[0] < larger[0] and smaller[1] > larger[1] for smaller, larger in pairwise(points)
    )


def _falling(lines: Records, plans: Iterable[Record]) -> list[Record]:
    """Whether no plan of a model is slower than one for less memory."""
    found = []
    for model in lines.models:
        own = [r for r in plans if r["model"] == model]
        ordered = sorted(own, key=lambda r: (r["budget_bytes"], -r["ms"]))
        times_ms = [math.inf, *(r["ms"] for r in ordered)]
        holds = all(after <= before * (1 + ROUNDING) for before, after in pairwise(times_ms))
        if own:
            found.append({"place": model, "holds": holds})
    return found
