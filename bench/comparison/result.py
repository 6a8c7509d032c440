"""One model's points, and each peer's point beside ours.

A peer's point is dominated if one of our plans has no greater measured peak and takes no more time,
within `TIME_TOLERANCE`. The plan that is compared with a peer is chosen by prediction: the fastest
of those whose measured peak is no greater. A choice by measured time would pick lucky measurements.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from bench.command import Record, newest

OURS = "rockmate"
ONE_PER_LAYER = "checkpoint"
TIME_TOLERANCE = 0.02
LEAST_PEAK_RATIO = 2.5
GRADIENT_TOLERANCE = 1e-3
"""Relative difference of gradients, above which a step does not train as eager's does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One method on one model.

    Attributes:
        method: Its name.
        family: Of the method.
        owner: "peer" or "ours".
        peak_bytes: Activation peak by the allocator's events.
        resident_bytes: The same by the resident high-water mark; None if it was not taken.
        ms: Median time of a step.
        ratio: Median over rounds of the time over eager's in the same round; NaN if not timed.
        spread: Largest less smallest of those ratios.
        prepare_s: Time of compiling or planning.
        gradient_difference: Largest relative difference from eager's; 0 is bitwise equal.
        budget_bytes: The budget it was planned for; None for a peer.
        predicted_ratio: Predicted time over that of the baseline, so that plans of several runs
            can be compared; None for a peer.
    """

    method: str
    family: str
    owner: str
    peak_bytes: int
    resident_bytes: int | None
    ms: float
    ratio: float
    spread: float
    prepare_s: float
    gradient_difference: float
    budget_bytes: int | None = None
    predicted_ratio: float | None = None

    @property
    def ratio_text(self) -> str:
        """The time over eager's with its spread, empty if it was not timed."""
        return "" if math.isnan(self.ratio) else f"{self.ratio:.3f} ± {self.spread:.3f}"

    @property
    def gradients_text(self) -> str:
        """The difference of the gradients from eager's."""
        if self.gradient_difference == 0:
            return "bitwise"
        if self.is_wrong:
            return f"**wrong**, {self.gradient_difference:.1g}"
        return f"{self.gradient_difference:.1e}"

    @property
    def is_wrong(self) -> bool:
        """Whether the gradients differ from eager's beyond the tolerance."""
        return not self.gradient_difference <= GRADIENT_TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A peer's point, and ours at no greater peak; None if we have none."""

    peer: Point
    ours: Point | None

    @property
    def excess(self) -> float:
        """Our time over the peer's, less 1; infinite if we have no point."""
        return math.inf if self.ours is None else self.ours.ratio / self.peer.ratio - 1

    @property
    def share(self) -> float:
        """Our peak over the peer's; infinite if we have no point."""
        return math.inf if self.ours is None else self.ours.peak_bytes / self.peer.peak_bytes

    @property
    def noise_text(self) -> str:
        """Whether the times differ by no more than both spreads."""
        ours = self.ours or self.peer
        noise = ours.spread + self.peer.spread
        if ours.ratio - self.peer.ratio <= noise:
            return "yes"
        return "no" if noise else "unknown: one round"

    @property
    def is_dominated(self) -> bool:
        """Whether ours takes no more time, within `TIME_TOLERANCE`."""
        return self.excess <= TIME_TOLERANCE


class ModelResult:
    """All points of one model."""

    def __init__(self, name: str, records: Sequence[Record]) -> None:
        """Takes the records of this model; see `bench.comparison`."""
        self.name = name
        self.records = records
        self._plans = {record["method"]: record for record in self.of("plan")}
        self._times: dict[str, list[Record]] = {}
        for record in self.of("time"):
            self._times.setdefault(record["method"], []).append(record)
        points = newest(self.of("point"), "method")
        distinct = [record for record in points if record["same_as"] is None]
        self.points = [self._point(record) for record in distinct]
        timed = [point for point in self.points if not math.isnan(point.ratio)]
        self.peers = [point for point in timed if point.owner == "peer"]
        self.ours = [point for point in timed if point.family == OURS]

    def of(self, kind: str) -> list[Record]:
        """The records of that kind."""
        return [record for record in self.records if record["kind"] == kind]

    def _point(self, record: Record) -> Point:
        plan, times = self._plans.get(record["method"], {}), self._times.get(record["method"], [])
        ratios = [time["ms"] / time["eager_ms"] for time in times]
        return Point(
            method=record["method"],
            family=record["family"],
            owner=record["owner"],
            peak_bytes=record["peak_bytes"],
            resident_bytes=record["resident_bytes"],
            ms=statistics.median(time["ms"] for time in times) if times else math.nan,
            ratio=statistics.median(ratios) if ratios else math.nan,
            spread=max(ratios) - min(ratios) if ratios else math.nan,
            prepare_s=record["prepare_s"],
            gradient_difference=record["gradients"]["largest_relative"],
            budget_bytes=plan.get("budget_bytes"),
            predicted_ratio=plan.get("predicted_ratio"),
        )

    @property
    def eager(self) -> Point | None:
        """Eager's point."""
        return next((point for point in self.points if point.method == "eager"), None)

    @property
    def all_points(self) -> list[Point]:
        """Peers' points, then ours, by falling peak."""
        return sorted(self.points, key=lambda each: (each.owner != "peer", -each.peak_bytes))

    def match_of(self, point: Point) -> Match | None:
        """That of a peer's point."""
        return next((match for match in self.matches if match.peer is point), None)

    @cached_property
    def matches(self) -> list[Match]:
        """Each peer's point with ours, by falling peak."""
        ordered = sorted(self.peers, key=lambda point: -point.peak_bytes)
        return [Match(peer=peer, ours=self.within(peer.peak_bytes)) for peer in ordered]

    def within(self, peak_bytes: int) -> Point | None:
        """Of our points with no greater measured peak, the one with the least predicted time."""
        fitting = [point for point in self.ours if point.peak_bytes <= peak_bytes]
        return min(
            fitting, key=lambda point: (point.predicted_ratio, point.peak_bytes), default=None
        )

    @property
    def checkpoint(self) -> Match | None:
        """One checkpoint per layer, and ours at its peak."""
        return next((match for match in self.matches if match.peer.method == ONE_PER_LAYER), None)

    @property
    def least(self) -> Match | None:
        """The least peak of any peer, and ours in at most `LEAST_PEAK_RATIO` times eager's time."""
        fast = [point for point in self.ours if point.ratio <= LEAST_PEAK_RATIO]
        if not self.peers:
            return None
        peer = min(self.peers, key=lambda point: (point.peak_bytes, point.ratio))
        return Match(peer=peer, ours=min(fast, key=lambda point: point.peak_bytes, default=None))


def by_model(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by model, in the order of their first lines."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["model"], []).append(record)
    return found
