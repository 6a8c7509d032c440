"""One budget of a sweep: what is predicted for it, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

from rockmate.plan.plan import Plan
from rockmate.sweeps.knees import knees
from rockmate.sweeps.measure import Measurement

_HUNDRED_MIB = 100 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One budget under one strategy. `pandas.DataFrame(rows)` makes a table of several.

    All peaks are activation peaks: what is allocated, during a forward and a backward, beyond what
    was there before, `.grad` in place. Predicted figures are None where the budget is not feasible,
    measured ones where nothing was measured.

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
            `Plan.quick_lower_bound_ms`, so the plan's own may be closer.
        num_recomputed: runs that repeat an op.
        loss_chunks: the chunks that the step runs in; empty if it is whole.
        moved_bytes: bytes that moved values take in another memory tier.
        extra_ms_per_100_mib: predicted time that 100 MiB (2**20 bytes each) less cost, from the
            next larger peak of the strategy down to this one.
        is_recommended: whether the strategy's curve has a knee here; see `rockmate.sweeps.knees`.
        measured_peak_bytes: by the allocator, over one step.
        measured_ms: one forward and backward, the median over steps.
        measured_ratio: median over the steps of its time over eager's right before it.
        measured_ratio_spread: largest less smallest of those.
        gradient_difference: largest |ours - eager's| / largest |eager's|, over parameters and
            steps; 0 where all are equal bit for bit.
        differing_gradient: the parameter where that is.
        gradient_tolerance: how much of it the order of a sum explains.
        eager_peak_bytes: eager's measured peak; None where it did not fit the device.
        eager_ms: eager's time beside this plan's, the median over steps.
        num_steps: that were measured.
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
    loss_chunks: str = ""
    moved_bytes: int | None = None
    extra_ms_per_100_mib: float | None = None
    is_recommended: bool = False
    measured_peak_bytes: int | None = None
    measured_ms: float | None = None
    measured_ratio: float | None = None
    measured_ratio_spread: float | None = None
    gradient_difference: float | None = None
    differing_gradient: str = ""
    gradient_tolerance: float = 0.0
    eager_peak_bytes: int | None = None
    eager_ms: float | None = None
    num_steps: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """What tells rows of a sweep apart."""
        return self.strategy, self.budget_bytes

    @property
    def is_measured(self) -> bool:
        """Whether a step was measured."""
        return self.measured_peak_bytes is not None

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

    def as_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return asdict(self)

    def with_measurement(self, measured: Measurement) -> SweepRow:
        """The row with what was measured."""
        return replace(
            self,
            measured_peak_bytes=measured.peak_bytes,
            measured_ms=measured.median_ms,
            measured_ratio=measured.ratio,
            measured_ratio_spread=measured.ratio_spread,
            gradient_difference=measured.gradients.largest_relative if measured.gradients else None,
            differing_gradient=measured.gradients.where if measured.gradients else "",
            gradient_tolerance=measured.gradient_tolerance,
            eager_peak_bytes=measured.eager_peak_bytes,
            eager_ms=measured.eager_ms,
            num_steps=measured.num_steps,
        )


ROW_NAMES = tuple(field.name for field in fields(SweepRow))


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
        lower_bound_ratio=plan.quick_lower_bound_ms / plan.baseline_ms if plan.baseline_ms else 0.0,
        num_recomputed=plan.schedule.num_recomputations(),
        loss_chunks=plan.options.get("loss_chunks", ""),
        moved_bytes=plan.simulation.host_bytes or None,
    )


def compared(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The rows by strategy and budget, with what follows from their neighbours.

    Knees, and what memory costs.
    """
    result: list[SweepRow] = []
    for strategy in dict.fromkeys(row.strategy for row in rows):
        result += _compared_curve(
            sorted(
                (row for row in rows if row.strategy == strategy), key=lambda row: row.budget_bytes
            )
        )
    return result


def _compared_curve(rows: Sequence[SweepRow]) -> list[SweepRow]:
    points = {index: found for index, row in enumerate(rows) if (found := _point(row)) is not None}
    feasible = list(points)
    bends = {feasible[knee] for knee in knees(list(points.values()))}
    costs = {
        index: _extra_ratio(points[index], points[larger]) for index, larger in pairwise(feasible)
    }
    return [
        replace(row, is_recommended=i in bends, extra_ms_per_100_mib=_in_ms(row, costs.get(i)))
        for i, row in enumerate(rows)
    ]


def _point(row: SweepRow) -> tuple[int, float] | None:
    """Predicted bytes and time ratio, None where the budget is not feasible.

    Ratios, because rows of an earlier run have op times that were measured then, and the machine
    may be faster now.
    """
    if row.predicted_peak_bytes is None or row.predicted_ratio is None:
        return None
    return row.predicted_peak_bytes, row.predicted_ratio


def _extra_ratio(point: tuple[int, float], larger: tuple[int, float]) -> float | None:
    """What each 100 MiB cost that the one saves beyond the other."""
    saved_bytes = larger[0] - point[0]
    return (point[1] - larger[1]) * _HUNDRED_MIB / saved_bytes if saved_bytes > 0 else None


def _in_ms(row: SweepRow, ratio: float | None) -> float | None:
    return (
        ratio * row.predicted_ms / row.predicted_ratio
        if ratio is not None and row.predicted_ms and row.predicted_ratio
        else None
    )
