"""Shares of one budget among the parts of a step, which graph breaks leave.

A part is a graph with a plan of its own. While it runs, three kinds of values are live: its own, at
most its peak; what earlier parts save for their backwards; and, in its backward, outputs of later
parts, whose memory the user may hold. Backwards run in the reverse order of forwards, since
autograd takes the latest node first. So with the parts of a step in the order of their forwards,

    peak = max over i of  sum_{j<i} saved_j + peak_i + sum_{j>i} outputs_j

The share of a part lies at the same fraction between its smallest peak and its baseline peak. The
largest fraction that keeps the budget is found by bisection, since a part with a larger share may
save less or more.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from rockmate.plan.plan import Plan
from rockmate.planner import Planner

_NUM_HALVINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of a budget.

    Attributes:
        bytes_of: the share of each part.
        part_peaks_bytes: predicted peaks of the parts, in the order of their forwards.
        peak_bytes: predicted peak of the whole step.
    """

    bytes_of: Mapping[Hashable, int]
    part_peaks_bytes: tuple[int, ...]
    peak_bytes: int


@dataclass(slots=True)
class PartCall:
    """One forward of a part.

    Attributes:
        part: identifies the part and the sizes of its call.
        planner: of the part.
        output_bytes: of its outputs.
    """

    part: Hashable
    planner: Planner
    output_bytes: int = 0


def shares_within(calls: Sequence[PartCall], budget_bytes: int, strategy: str) -> Shares:
    """Shares that keep the budget, or the smallest peaks if those do not.

    Args:
        calls: the parts in the order of their forwards.
        budget_bytes: of the step.
        strategy: see `Planner.plan`.
    """

    def at(fraction: float) -> Shares:
        shares = {call.part: _share(call.planner, fraction) for call in calls}
        plans = [call.planner.plan(shares[call.part], strategy=strategy) for call in calls]
        return Shares(
            bytes_of=shares,
            part_peaks_bytes=tuple(plan.predicted_peak_bytes for plan in plans),
            peak_bytes=step_peak_bytes(plans, [call.output_bytes for call in calls]),
        )

    low, high = 0.0, 1.0
    if (whole := at(high)).peak_bytes <= budget_bytes:
        return whole
    best = at(low)
    if best.peak_bytes > budget_bytes:
        return best
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if (tried := at(middle)).peak_bytes <= budget_bytes:
            low, best = middle, tried
        else:
            high = middle
    return best


def step_peak_bytes(plans: Sequence[Plan], output_bytes: Sequence[int]) -> int:
    """The predicted peak of a step whose parts run these plans; see the formula above."""
    earlier, later, peak = 0, sum(output_bytes), 0
    for plan, outputs in zip(plans, output_bytes, strict=True):
        later -= outputs
        peak = max(peak, earlier + plan.predicted_peak_bytes + later)
        earlier += plan.simulation.saved_bytes
    return peak


def _share(planner: Planner, fraction: float) -> int:
    minimum = planner.minimum_peak_bytes
    return minimum + int(fraction * max(0, planner.baseline_peak_bytes - minimum))
