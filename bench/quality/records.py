"""The records of all models by kind, and what is computed from them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

from bench.command import Record

ROUNDING = 1e-9
"""Relative, of times: the same op times may be summed in another order."""


def newest_of_models(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each model, from its newest one of kind `model` on."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "model":
            found[record["model"]] = []
        found.setdefault(record["model"], []).append(record)
    return found


class Records:
    """The records by kind."""

    def __init__(self, records: Iterable[Record]) -> None:
        by_kind: dict[str, list[Record]] = {}
        for record in chain.from_iterable(newest_of_models(records).values()):
            by_kind.setdefault(record["kind"], []).append(record)
        self.models = {r["model"]: r for r in by_kind.get("model", [])}
        self.plans = by_kind.get("plan", [])
        self.feasible = [r for r in self.plans if r["is_feasible"]]
        self.ours = [r for r in self.feasible if r["strategy"] == "rockmate"]
        # Chunked plans run another graph, which has a bound of its own.
        self.unchunked = [r for r in self.ours if not r["chunks"]]
        self.chunked = by_kind.get("chunked", [])
        self._own_ms = {key_of(r): r["ms"] for r in self.ours}
        self.bounds_ms = {key_of(r): r["lower_bound_ms"] for r in self.unchunked}

    def own_ms(self, other: Record) -> float:
        """Time of the default strategy at the same budget; infinite if it has no plan."""
        return self._own_ms.get(key_of(other), math.inf)

    def gaps(self, model: str) -> dict[float, float]:
        """Budget to gap, at the budgets of the table."""
        return {
            r["budget"]: r["gap"]
            for r in self.ours
            if r["model"] == model and r["purpose"] == "budget"
        }

    def infeasible(self, model: str) -> list[float]:
        """Budgets of the table without a plan of the default strategy."""
        budgets = [
            r
            for r in self.plans
            if r["model"] == model and r["purpose"] == "budget" and r["strategy"] == "rockmate"
        ]
        return [r["budget"] for r in budgets if not r["is_feasible"]]

    def gaps_of_models(self) -> dict[str, dict[float, float]]:
        """The gaps of each model that has some."""
        found = {model: self.gaps(model) for model in self.models}
        return {model: gaps for model, gaps in found.items() if gaps}


def place(lines: Records, record: Record) -> str:
    """Model, strategy and budget of a record, in words."""
    strategy = "" if record.get("strategy", "rockmate") == "rockmate" else f" {record['strategy']}"
    baseline_bytes = lines.models[record["model"]]["baseline_peak_bytes"]
    return f"{record['model']}{strategy} at {record['budget_bytes'] / baseline_bytes:.3f}"


def key_of(record: Record) -> tuple[str, int]:
    """Model and budget in bytes."""
    return record["model"], record["budget_bytes"]


def chunked_gap(record: Record) -> float:
    """Gap of a chunked record, over the baseline's time."""
    return record["ratio"] - record["lower_bound_ratio"]


def percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.2f} %"
