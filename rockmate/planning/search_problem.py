"""What the parts of the local search share: the graph's refiner, its baseline, the stopping rule.

The gap of a candidate is its time less the lower bound of the budget, as a fraction of the baseline
time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import monotonic

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op
from rockmate.planning.candidate import Candidate
from rockmate.planning.options import PlanOptions
from rockmate.planning.refine import ScheduleRefiner
from rockmate.planning.starts import WarmStarts
from rockmate.schedule.schedule import baseline_schedule


class SearchProblem:
    """A graph with its warm starts, its baseline and the refiner of its schedules.

    Args:
        backward: late and backward ops in the baseline's order; None for the graph's order.

    Attributes:
        starts: the schedules to begin with, and the lower bound.
        rule: when the search ends; by default at the default tolerance, without limit.
        refiner: repairs and refines schedules of the graph.
        baseline: the schedule without recomputation.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        starts: WarmStarts,
        rule: StoppingRule | None = None,
        *,
        backward: Sequence[Op] | None = None,
    ) -> None:
        self.graph, self.costs, self.starts = graph, costs, starts
        self.rule = rule or StoppingRule()
        self.refiner = ScheduleRefiner(graph, costs)
        self.baseline = self.refiner.evaluate(baseline_schedule(graph, backward))

    def gap(self, candidate: Candidate, budget_bytes: int) -> float:
        """A candidate's time less the lower bound, as a fraction of the baseline's time."""
        excess_ms = candidate.time_ms - self.starts.bound_ms(budget_bytes)
        return excess_ms / self.baseline.time_ms

    def is_solved(self, candidate: Candidate, budget_bytes: int) -> bool:
        """Whether the search for a budget ends with this candidate.

        It is within the gap tolerance, or as fast as the baseline, or the time is over.
        """
        return (
            self.gap(candidate, budget_bytes) <= self.rule.gap_tolerance
            or candidate.time_ms <= self.baseline.time_ms
            or self.rule.is_late
        )


_DEFAULT = PlanOptions().gap_tolerance


class StoppingRule:
    """The rule that all searches of a planner share.

    Attributes:
        gap_tolerance: a schedule is good enough if its time is at most the lower bound and this
            fraction of the baseline's time.
        time_limit_s: wall time of the search for one plan, in seconds.
    """

    def __init__(self, gap_tolerance: float = _DEFAULT, time_limit_s: float = math.inf) -> None:
        """Starts with nothing spent; both are above 0."""
        self.gap_tolerance, self.time_limit_s = gap_tolerance, time_limit_s
        self._deadline = math.inf

    @property
    def is_late(self) -> bool:
        """Whether the time of the present plan is over."""
        return monotonic() >= self._deadline

    def begin(self, num_plans: int = 1) -> None:
        """Starts the clock for one plan, or for so many that are made together."""
        self._deadline = monotonic() + num_plans * self.time_limit_s
