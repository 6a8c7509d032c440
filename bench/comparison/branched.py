"""The page of `bench.compare --branched`: models whose step is not a chain of blocks.

Targets are set in its template, before anything is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import peers
from bench.command import Record
from bench.comparison.result import OURS, ModelResult, Point
from bench.pages import OURS_COLOR, PEER_COLOR, Line, Start, filled, picture, provenance

CHAINS = ("gpt2-12", "llama", "resnet50")
SHARES = ("1.0", "0.7", "0.5", "0.35", "minimum")
PEERS = ("checkpoint", peers.STAGES)
HALF, SMALLEST = "0.5", "minimum"


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
    def checkpoint(self) -> Point | None:
        """One checkpoint for each layer."""
        return _point(self.result, PEERS[0])

    @property
    def stages(self) -> Point | None:
        """One for each stage."""
        return _point(self.result, PEERS[1])

    @property
    def planning_s(self) -> float:
        """Seconds without the capture: op costs, solving, and the slowest budget."""
        timings = self.planner["timings_s"]
        slowest = max((plan["plan_s"] for plan in self.result.of("plan")), default=0.0)
        return timings["costs"] + timings["solve"] + slowest

    @property
    def share_of_checkpoint(self) -> float:
        """Our least measured peak over that of checkpoints; NaN if one is missing."""
        found = [point.peak_bytes for point in (self.checkpoint, self.stages) if point]
        own = _point(self.result, f"{OURS}: {SMALLEST}")
        return own.peak_bytes / min(found) if found and own else math.nan

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


def page(results: Sequence[ModelResult]) -> list[str]:
    """The page's lines, for models with an eager point and a planner's record."""
    cases = [case for result in results for case in _cases(result)]
    return filled(
        "branched",
        headline=_headline([c for c in cases if c.share == HALF and c.is_timed]),
        cases=cases,
        at_budgets=[case for case in cases if case.share in SHARES],
        provenance=provenance(list(_starts(results))),
        failures=[
            f"- {r.name}: {failed['method']} **failed**: {failed['error']}"
            for r in results
            for failed in r.of("failed")
        ],
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
