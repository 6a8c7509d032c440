"""One size of a fit: where the memory goes and how fast it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rockmate.curves.curve import CurveRow
from rockmate.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FitRow(CurveRow):
    """Training at one size within the memory.

    All bytes are predicted but those whose name says measured, which stand in the attributes of
    `rockmate.Measurement`. `total_bytes` is the sum of the parts, at the peak of the
    step.

    Attributes:
        batch_size: rows of a batch.
        num_tokens: in a row; None where the sample has no such dimension.
        device_bytes: what the device itself takes, with a margin for its allocator.
        parameter_bytes: parameters and buffers.
        gradient_bytes: gradients at rest.
        state_bytes: the optimizer's state.
        input_bytes: the batch; all batches of the forwards in flight.
        activation_bytes: activations and their gradients, at the peak.
        workspace_bytes: what the op at the peak allocates while it runs.
        baseline_peak_bytes: activations and workspace at the peak with nothing recomputed.
        predicted_ms: forward and backward.
        baseline_ms: forward and backward with nothing recomputed.
        num_recomputations: ops that run again.
        host_bytes: what moved values take in the other memory tier; no part of the memory.
        num_moves: values that move there and back.
        is_largest: whether it is the largest size that fits.
        is_fastest: whether no other row trains more rows, or tokens, a second.
    """

    batch_size: int
    num_tokens: int | None
    device_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    input_bytes: int
    activation_bytes: int
    workspace_bytes: int
    baseline_peak_bytes: int
    predicted_ms: float
    baseline_ms: float
    num_recomputations: int
    host_bytes: int = 0
    num_moves: int = 0
    is_largest: bool = False
    is_fastest: bool = False

    @property
    def peak_bytes(self) -> int:
        """Activations and workspace at the peak."""
        return self.activation_bytes + self.workspace_bytes

    @property
    def total_bytes(self) -> int:
        """All memory at the peak of the step."""
        return sum(getattr(self, name) for name in PARTS)

    @property
    def overhead(self) -> float:
        """Predicted time over the time with nothing recomputed, less 1."""
        return self.predicted_ms / self.baseline_ms - 1 if self.baseline_ms else 0.0

    @property
    def step_ms(self) -> float:
        """Forward and backward: measured where it was, else predicted."""
        return self.predicted_ms if self.measured_ms is None else self.measured_ms

    @property
    def samples_per_s(self) -> float:
        """Rows a second, forward and backward alone."""
        return 1e3 * self.batch_size / self.step_ms if self.step_ms else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second, forward and backward alone."""
        return None if self.num_tokens is None else self.samples_per_s * self.num_tokens

    def size(self, axis: str) -> int:
        """The size along "batch" or "tokens"."""
        return self.batch_size if axis == "batch" else self.num_tokens or 0

    def speed(self, axis: str) -> float:
        """Samples a second; tokens a second along "tokens"."""
        return self.samples_per_s if axis == "batch" else self.tokens_per_s or 0.0

    def as_dict(self) -> dict[str, Any]:
        """The attributes by name, and the derived ones."""
        return {**CurveRow.as_dict(self), **{name: getattr(self, name) for name in _DERIVED}}


_DERIVED = ("peak_bytes", "total_bytes", "overhead", "samples_per_s", "tokens_per_s")
PARTS = {
    "device_bytes": "device",
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "state_bytes": "optimizer state",
    "input_bytes": "batch",
    "activation_bytes": "activations",
    "workspace_bytes": "workspace",
}
"""The parts of a row's memory, with their names."""


def workspace_at_peak(plan: Plan) -> int:
    """Bytes that the op at the peak allocates beside its results."""
    costs = plan.schedule.run_costs(plan.costs)
    return costs[plan.simulation.peak_position].overhead_bytes if costs else 0
