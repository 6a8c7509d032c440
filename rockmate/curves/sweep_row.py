"""One budget of a sweep: what is predicted for it, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rockmate.curves.curve import CurveRow
from rockmate.plan.plan import Plan
from rockmate.planning.curve_choice import recommended

_LEAST_SAVED = 0.01  # of a tenth; below it the slope is noise


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SweepRow(CurveRow):
    """One budget under one strategy.

    All peaks are activation peaks: what is allocated, during a forward and a backward, beyond what
    was there before, `.grad` in place. Predicted figures are None where the budget is not feasible.
    What was measured stands in the attributes of `rockmate.Measurement`.

    Attributes:
        strategy: what planned; see `rockmate.STRATEGIES`.
        budget_bytes: the activation budget.
        budget_share: of the predicted peak with nothing recomputed.
        is_feasible: whether the strategy has a plan within it.
        problem: why there is no plan, or no measurement; empty otherwise.
        minimum_bytes: the smallest budget for which the strategy always has a plan; None where that
            is not known.
        predicted_peak_bytes: of the plan, by the simulator.
        predicted_ms: one forward and backward, the sum of op times.
        predicted_ratio: that over the time with nothing recomputed.
        lower_bound_ratio: no schedule within the budget takes less; 0 where nothing is proved.
        num_recomputed: runs that repeat an op.
        moved_bytes: bytes that moved values take in another memory tier.
        extra_ms_per_tenth: predicted time that a tenth less of the peak with nothing recomputed
            costs, from the next larger peak of the strategy down to this one.
        is_recommended: whether it is the row to begin with; see `Sweep.recommended`.
    """

    strategy: str
    budget_bytes: int
    budget_share: float
    is_feasible: bool
    problem: str = ""
    minimum_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_ms: float | None = None
    predicted_ratio: float | None = None
    lower_bound_ratio: float | None = None
    num_recomputed: int | None = None
    moved_bytes: int | None = None
    extra_ms_per_tenth: float | None = None
    is_recommended: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """What tells rows of a sweep apart."""
        return self.strategy, self.budget_bytes

    @property
    def address(self) -> str:
        """The id of what a page says of the row; marks of the picture lead to it."""
        return f"budget-{self.strategy}-{self.budget_bytes}"

    @property
    def point(self) -> tuple[int, float]:
        """Predicted peak and time ratio of a feasible row.

        Ratios, because rows of an earlier run have op times that were measured then, and the
        machine may be faster now.
        """
        return self.predicted_peak_bytes or 0, self.predicted_ratio or 0.0

    @property
    def broken_promise(self) -> str:
        """What was promised and did not hold when it was measured, in words; empty if all did."""
        if self.measured_peak_bytes is not None and self.measured_peak_bytes > self.budget_bytes:
            return (
                f"the measured peak is {self.measured_peak_bytes - self.budget_bytes:,} bytes "
                "above the budget"
            )
        if (
            self.gradient_difference is not None
            and not self.gradient_difference <= self.gradient_tolerance
        ):
            return (
                f"the gradient of {self.differing_gradient} differs from eager's by "
                f"{self.gradient_difference:.1e}"
            )
        return ""


def planned_row(plan: Plan, *, minimum_bytes: int) -> SweepRow:
    """The row of a plan."""
    return SweepRow(
        strategy=plan.strategy,
        budget_bytes=plan.budget_bytes,
        budget_share=plan.budget_bytes / plan.baseline_peak_bytes,
        is_feasible=True,
        minimum_bytes=minimum_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        predicted_ms=plan.predicted_ms,
        predicted_ratio=plan.predicted_ratio,
        lower_bound_ratio=plan.lower_bound_ms / plan.baseline_ms if plan.baseline_ms else 0.0,
        num_recomputed=plan.schedule.num_recomputations(),
        loss_chunks=str(plan.options.loss_chunks or ""),
        moved_bytes=plan.simulation.host_bytes or None,
    )


def compared(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The rows by strategy and budget, with the recommended one and what memory costs."""
    result: list[SweepRow] = []
    for strategy in dict.fromkeys(row.strategy for row in rows):
        curve = [row for row in rows if row.strategy == strategy]
        curve.sort(key=lambda row: row.budget_bytes)
        feasible = [row for row in curve if row.is_feasible]
        place = None if result else recommended([row.point for row in feasible])
        chosen = None if place is None else feasible[place].key
        costs = {row.key: _extra_ms(row, larger) for row, larger in pairwise(feasible)}
        result += [
            replace(row, is_recommended=row.key == chosen, extra_ms_per_tenth=costs.get(row.key))
            for row in curve
        ]
    return result


def _extra_ms(row: SweepRow, larger: SweepRow) -> float | None:
    """What each tenth of the peak costs that a row saves beyond one of a larger budget."""
    saved_bytes = larger.point[0] - row.point[0]
    tenth_bytes = row.budget_bytes / row.budget_share / 10
    if saved_bytes <= _LEAST_SAVED * tenth_bytes or not row.predicted_ratio:
        return None
    extra = (row.predicted_ratio - larger.point[1]) * tenth_bytes / saved_bytes
    return extra * (row.predicted_ms or 0.0) / row.predicted_ratio
