"""The problem that the parts of the local search share, and the gaps at which they stop.

The gap of a candidate is its time less the lower bound of the budget, as a fraction of the baseline
time. Each stage of the search is skipped where the incumbent's gap is small, or when time is over.
The gaps below hold for `DEFAULT_GAP_TOLERANCE`, and grow in proportion to the tolerance asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op
from rockmate.planning.candidate import Candidate
from rockmate.planning.refine import ScheduleRefiner
from rockmate.planning.starts import WarmStarts
from rockmate.planning.stopping_rule import DEFAULT_GAP_TOLERANCE, StoppingRule
from rockmate.schedule.schedule import baseline_schedule

# Below this gap, no further start from the knapsack or from the grid of rotor's table is refined.
SKIP_STARTS_BELOW_GAP = 5e-5
# Below this gap, rotor's table is not solved, gradients are not deferred while tightening, and the
# search ends.
SKIP_ROTOR_BELOW_GAP = DEFAULT_GAP_TOLERANCE
# Below this gap, no start beyond the grid of rotor's table is refined, and no incumbent is
# improved.
SKIP_REFINEMENT_BELOW_GAP = 2.5e-3
# Below this gap, no weight gradient is deferred when many budgets are planned jointly.
SKIP_DEFERRAL_BELOW_GAP = 5e-3
# Below this gap, no strategic oscillation is done.
SKIP_OSCILLATION_BELOW_GAP = 1e-2
# Below this gap, starts from other budgets and from far above the budget are not tried.
SKIP_DISTANT_STARTS_BELOW_GAP = 2e-2


class SearchProblem:
    """A graph with its warm starts, its baseline and the refiner of its schedules.

    Args:
        graph: ops and storages.
        costs: of its ops.
        starts: the schedules to begin with, and the lower bound.
        rule: when the search ends.
        backward: late and backward ops in the baseline's order; None for the graph's order.

    Attributes:
        costs: as given.
        starts: as given.
        rule: as given.
        refiner: repairs and refines schedules of the graph.
        baseline: the schedule without recomputation.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        starts: WarmStarts,
        rule: StoppingRule,
        *,
        backward: Sequence[Op] | None = None,
    ) -> None:
        self.costs = costs
        self.starts = starts
        self.rule = rule
        self.refiner = ScheduleRefiner(graph, costs)
        self.baseline = self.refiner.evaluate(baseline_schedule(graph, backward))

    @property
    def is_long(self) -> bool:
        """Whether the step is too long for the stages that take most time."""
        return self.refiner.is_long

    def gap(self, candidate: Candidate, budget_bytes: int) -> float:
        """A candidate's time less the lower bound, as a fraction of the baseline's time."""
        excess_ms = candidate.time_ms - self.starts.bound_ms(budget_bytes)
        return excess_ms / self.baseline.time_ms

    def is_within_gap(self, candidate: Candidate, budget_bytes: int, gap: float) -> bool:
        """Whether a candidate is good enough to skip what gains less than a gap.

        So is one within the gap of the lower bound or as fast as the baseline, and any when the
        time of the search is over.
        """
        baseline_ms = self.baseline.time_ms
        limit_ms = self.starts.bound_ms(budget_bytes) + gap * self.rule.scale * baseline_ms
        return candidate.time_ms <= max(limit_ms, baseline_ms) or self.rule.is_late
