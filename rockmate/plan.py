"""The plan: a schedule with what it promises, for a person to read and a module to run."""

from __future__ import annotations

from dataclasses import dataclass

from rockmate.budget import size_text
from rockmate.graph import Graph, Op, Phase
from rockmate.schedule import Schedule
from rockmate.simulate import Simulation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A schedule that fits a budget.

    Attributes:
        budget_bytes: the activation budget: bounds what is allocated beyond what was there when the forward was called, at every
            moment of the step, gradients at rest in `.grad` not counted, outputs counted until the backward has ended.
        predicted_peak_bytes: the simulator's peak, counted in the same way; at most the budget.
        predicted_ms: one forward and backward, the sum of measured op times.
        baseline_peak_bytes: the peak with nothing recomputed.
        baseline_ms: the time with nothing recomputed.
        schedule: the order in which ops run.
        simulation: live bytes at every run.
        graph: what the schedule's indices mean.
        num_unproved_blocks: distinct blocks whose solver stopped at its time limit with an answer that may not be the best.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    predicted_ms: float
    baseline_peak_bytes: int
    baseline_ms: float
    schedule: Schedule
    simulation: Simulation
    graph: Graph
    num_unproved_blocks: int = 0

    @property
    def predicted_ratio(self) -> float:
        """Predicted time over that of no recomputation."""
        return self.predicted_ms / self.baseline_ms if self.baseline_ms else 1.0

    @property
    def peak_op(self) -> Op:
        """The op that runs when the peak is reached."""
        return self.graph.ops[self.schedule.steps[self.simulation.peak_position]]

    def peak_place(self) -> str:
        """Where the peak is, in words."""
        op = self.peak_op
        half = "backward" if self.simulation.peak_position >= len(self.schedule.forward) else "forward"
        again = "the recomputation of " if op.phase is Phase.FORWARD and half == "backward" else ""
        return f"{again}{op.name} ({op.module or 'no single submodule'}) in the {half}"

    def summary(self) -> str:
        """A few lines: budget, peak and where it is, time, what is kept and what is recomputed."""
        recomputed = _most_recomputed(self)
        lines = [
            f"activation budget   {size_text(self.budget_bytes)}",
            f"predicted peak      {size_text(self.predicted_peak_bytes)}  ({_share(self.predicted_peak_bytes, self.baseline_peak_bytes)} "
            f"of {size_text(self.baseline_peak_bytes)} with nothing recomputed)",
            f"  reached in        {self.peak_place()}",
            f"predicted time      {self.predicted_ms:.1f} ms a step, {self.predicted_ratio:.3f}x of {self.baseline_ms:.1f} ms with "
            "nothing recomputed",
            f"kept for backward   {size_text(self.simulation.saved_bytes)}",
            f"recomputed          {self.schedule.num_recomputations()} of {len(self.graph.ops)} ops"
            + (f", most often {recomputed}" if recomputed else ""),
        ]
        if self.num_unproved_blocks:
            lines.append(f"solver              stopped at its time limit in {self.num_unproved_blocks} blocks; raise time_limit_s")
        return "\n".join(lines)


def _most_recomputed(plan: Plan) -> str:
    counts: dict[str, int] = {}
    seen: set[int] = set()
    for index in plan.schedule.steps:
        if index in seen:
            name = str(getattr(plan.graph.ops[index].node.target, "__name__", plan.graph.ops[index].node.target)).split(".")[0]
            counts[name] = counts.get(name, 0) + 1
        seen.add(index)
    top = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:4]
    return ", ".join(f"{name} x{count}" for name, count in top)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "all"
