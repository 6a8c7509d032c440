"""The page of `bench.plan_quality`, whose targets are in its template."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

from bench.command import Record
from bench.pages import about, filled

ROUNDING = 1e-9
"""Relative, of times: the same op times may be summed in another order."""
LARGEST_GAP = 0.02
LEAST_BUDGET = 0.25
"""Smallest budget whose gap has a target, as a fraction of the baseline's peak."""
SERIES = {
    "gpt2-deep": {0.48: 1.045, 0.28: 1.14, 0.18: 1.20, 0.12: 1.33},
    "bert-narrow": {0.49: 1.06, 0.31: 1.13, 0.17: 1.20, 0.10: 1.40},
    "llama": {0.48: 1.10, 0.33: 1.19, 0.25: 1.30},
}
"""Model to budget, as a fraction of the baseline's peak, to the target of its time ratio."""


def newest_of_models(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each model, from its newest one of kind `model` on."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "model":
            found[record["model"]] = []
        found.setdefault(record["model"], []).append(record)
    return found


class Records:
    """The records by kind, and what is computed from them."""

    def __init__(self, records: Iterable[Record]) -> None:
        every = list(chain.from_iterable(newest_of_models(records).values()))
        self.models = {r["model"]: r for r in every if r["kind"] == "model"}
        self.plans = [r for r in every if r["kind"] == "plan"]
        self.chunked = [r for r in every if r["kind"] == "chunked"]
        own = [r for r in self.plans if r["strategy"] == "rockmate"]
        self.ours = [r for r in own if r["is_feasible"]]
        # Chunked plans run another graph, which has a bound of its own.
        self.unchunked = [r for r in self.ours if not r["chunks"]]
        in_table = [r for r in own if r["purpose"] == "budget"]
        self.infeasible = {
            model: [r["budget"] for r in in_table if r["model"] == model and not r["is_feasible"]]
            for model in self.models
        }
        gaps = {
            model: {
                r["budget"]: r["gap"] for r in in_table if r["model"] == model and r["is_feasible"]
            }
            for model in self.models
        }
        self.gaps = {model: own for model, own in gaps.items() if own}

    def place(self, record: Record) -> str:
        """Model, strategy and budget of a record, in words."""
        strategy = record.get("strategy", "rockmate")
        words = record["model"] if strategy == "rockmate" else f"{record['model']} {strategy}"
        return f"{words} at {record['budget_bytes'] / self._peak_of(record):.3f}"

    def _peak_of(self, record: Record) -> int:
        return self.models[record["model"]]["baseline_peak_bytes"]

    def facts(self) -> dict[str, Any]:
        """What the targets are judged by, by name."""
        own_ms = {_key(r): r["ms"] for r in self.ours}
        bounds = {_key(r): r["lower_bound_ms"] for r in self.unchunked}
        feasible = [
            {**r, "place": self.place(r), "bound_ms": bounds.get(_key(r))}
            for r in self.plans
            if r["is_feasible"]
        ]
        others = [r for r in feasible if r["strategy"] != "rockmate"]
        return {
            "gaps": [
                {"model": model, "budget": budget, "gap": gap}
                for model, own in self.gaps.items()
                for budget, gap in own.items()
            ],
            "medians": [
                {"model": name, "gap": statistics.median(own.values())}
                for name, own in self.gaps.items()
            ],
            "num_infeasible": sum(len(self.infeasible[model]) for model in self.gaps),
            "series": [r for r in self.chunked if r["budget"] >= LEAST_BUDGET],
            "goals": self._goals(),
            "feasible": feasible,
            "frontiers": [
                {"place": f"{model} {strategy}", "holds": _is_monotone(points)}
                for model, record in self.models.items()
                for strategy, points in record.get("frontiers", {}).items()
            ],
            "unchunked": self._falling(self.unchunked),
            "all": self._falling(self.ours),
            "known": [r for r in self.models.values() if "minimum_peak_bytes" in r],
            # Infinite where ours has no plan.
            "others": [{**r, "own_ms": own_ms.get(_key(r), math.inf)} for r in others],
        }

    def _goals(self) -> list[tuple[Any, ...]]:
        """Model, budget and target of the series, with the outputs and with the loss alone."""
        whole = {(r["model"], r["budget"]): r for r in self.plans if r["purpose"] == "series"}
        chunked = {(r["model"], r["budget"]): r for r in self.chunked}
        return [
            (model, budget, target, whole.get((model, budget)), chunked.get((model, budget)))
            for model, targets in SERIES.items()
            for budget, target in targets.items()
        ]

    def _falling(self, plans: Sequence[Record]) -> list[Record]:
        """Whether no plan of a model is slower than one for less memory."""
        ordered = self._ordered(plans)
        return [
            {"place": model, "holds": all(not _is_slower(*pair) for pair in pairwise(own))}
            for model, own in ordered.items()
            if own
        ]

    def _ordered(self, plans: Sequence[Record]) -> dict[str, list[Record]]:
        """The plans of each model by budget."""
        ordered = sorted(plans, key=lambda r: (r["budget_bytes"], -r["ms"]))
        return {model: [r for r in ordered if r["model"] == model] for model in self.models}

    def rising_notes(self) -> list[str]:
        """Plans that are slower than another one with less memory."""
        found = []
        for own in self._ordered(self.unchunked).values():
            for smaller, larger in pairwise(own):
                if _is_slower(smaller, larger):
                    beyond = f"{100 * (larger['ms'] / smaller['ms'] - 1):.2f} %"
                    share = self.place(smaller).rpartition(" ")[2]
                    found.append(f"- {self.place(larger)}: the plan at {share} is {beyond} faster.")
        return found

    def row(self, name: str) -> Record:
        """The row of a model; without what its record lacks."""
        record, gaps = self.models[name], self.gaps.get(name, {})
        at = max(gaps, key=lambda budget: gaps[budget], default=None)
        row = {
            "name": name,
            **{key: record[key] for key in ("num_ops", "baseline_peak_bytes", "baseline_ms")},
            "gap": None if at is None else gaps[at],
            "gap_at": at,
            "gap_median": statistics.median(gaps.values()) if gaps else None,
            "infeasible": ", ".join(f"{each:g}" for each in self.infeasible[name]),
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


def _key(record: Record) -> tuple[str, int]:
    return record["model"], record["budget_bytes"]


def _is_slower(smaller: Record, larger: Record) -> bool:
    return larger["ms"] > smaller["ms"] * (1 + ROUNDING)


def _is_monotone(points: Sequence[Sequence[float]]) -> bool:
    return all(
        smaller[0] < larger[0] and smaller[1] > larger[1] for smaller, larger in pairwise(points)
    )


def page(records: Sequence[Record]) -> list[str]:
    """The page's lines."""
    lines = Records(records)
    facts, gaps = lines.facts(), [gap for own in lines.gaps.values() for gap in own.values()]
    return filled(
        "plan_quality",
        is_tiny=records[0]["tiny"],
        gaps=gaps,
        median=statistics.median(gaps) if gaps else None,
        facts=facts,
        provenance=about(records),
        models=list(map(lines.row, lines.models)),
        records=lines,
        largest_gap=LARGEST_GAP,
        loose=[r for r in lines.ours if r["purpose"] == "budget" and r["gap"] > LARGEST_GAP],
        loose_in_chunks=[
            r for r in facts["series"] if r["ratio"] - r["lower_bound_ratio"] > LARGEST_GAP
        ],
        rising=lines.rising_notes(),
    )
