"""Lower bounds on the time of every schedule of a graph within a budget.

**Problem.** Given a graph, its costs and a budget, find a time that no schedule beats, whichever
solver made it and however often it recomputes.

**Relaxation.** A schedule must fit at every program point; keep one of them. At a point (see
`bound.program_point`, `bound.forward_point`) some storages are live in every schedule. The rest of
the budget holds values of the forward. Each op after the point reads such values: each of them is
either live at the point, or recomputed after it, which costs its op's time and needs that op's
inputs on the same terms. The cheapest choice is a 0/1 knapsack with precedence constraints
(`bound.knapsack`). Its time added to the time of all first runs is a lower bound, and so is the
largest of these over all points.

| relaxed away | consequence |
|---|---|
| memory between the point and the later reads | a recomputed value takes time, but no memory |
| all other program points | a value evicted for two points is paid for once |
| the forward, and recomputations before the point | they are free |

**Complexity.** One knapsack for each of at most 15 points, relaxed to its lower convex hull, which
`checkmate.Curve` finds for all budgets at once in polynomial time. A budget then takes
microseconds.

**Not done.** Several points together, in one linear program (decision 29); memory while values are
recomputed; the staged form's bound, which is tighter but holds only for staged schedules. A bound
is for the schedules of one graph: a step that may run in chunks has one graph for each way, and its
bound is the least of theirs.

The proofs are in docs/internals/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property
from typing import NamedTuple

from checkmate import Curve
from rockmate.bound.forward_point import forward_points
from rockmate.bound.knapsack import in_flight_knapsack, knapsack_of
from rockmate.bound.program_point import ProgramPoint, ProgramPoints
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.graph.marking import forced_recomputations


class _PointCurve(NamedTuple):
    """The knapsack of one program point, for every budget.

    Attributes:
        point: the program point.
        curve: bounds the recompute time by the bytes left beside the point's own.
        values: the storage behind each value of the knapsack.
    """

    point: ProgramPoint
    curve: Curve
    values: list[Storage]


class LowerBound:
    """Lower bounds on the time of one graph's schedules.

    Attributes:
        forced: ops of the forward that every schedule recomputes, since marks ask for it.
        base_ms: the time of all first runs and of forced recomputations.
        program_points: the points of the backward.
    """

    def __init__(self, graph: Graph, costs: Costs, baseline_ms: float) -> None:
        """Computes nothing yet; `baseline_ms` is the time of every op's first run together."""
        self.graph = graph
        self.costs = costs
        # What every schedule takes: all first runs, and the recomputations that marks ask for.
        self.program_points = ProgramPoints(graph, costs)
        self._backward = self.program_points.runs
        self.forced = frozenset(forced_recomputations(graph.forward_ops, self._backward))
        forced_ms = sum(costs.recompute[op.index].time_ms for op in self.forced)
        self.base_ms = baseline_ms + forced_ms
        self._binding = cache(self._find_binding)

    # --- bounds -------------------------------------------------------------------------------

    def bound_ms(self, budget_bytes: int) -> float:
        """A time that no schedule of at most `budget_bytes` beats; infinite if none can fit."""
        return self.base_ms + self._binding(budget_bytes)[0]

    def saved_values_within(self, budget_bytes: int) -> frozenset[Storage] | None:
        """Values of the forward that are live at the binding point; None if no schedule can fit.

        A schedule that saves them until then and recomputes the rest once takes about the time of
        `bound_ms`, if it fits.
        """
        _, binding = self._binding(budget_bytes)
        if binding is None:
            return None
        point, curve, values = binding
        plan = curve.plan(budget_bytes - point.min_bytes)
        if plan is None:
            return None
        saved = {*point.live, *(values[value] for value in plan.saved if value < len(values))}
        saved |= self._made_after(point)
        return frozenset(each for each in saved if each.phase is Phase.FORWARD)

    @property
    def points(self) -> tuple[ProgramPoint, ...]:
        """The program points that `bound_ms` looks at."""
        return self.program_points.rising

    @property
    def peak_bound_bytes(self) -> int:
        """A peak that no schedule is below."""
        points = (*self.points, *self._forward_points)
        return max((point.min_bytes for point in points), default=0)

    # --- one point ----------------------------------------------------------------------------

    @cached_property
    def _curves(self) -> list[_PointCurve]:
        curves = []
        for point in (*self.points, *self._forward_points):
            problem, values = knapsack_of(
                self._ops_before(point),
                point.after,
                self.costs,
                available=point.live | self._made_after(point),
                with_states=True,
                free=self.forced,
            )
            curves.append(_PointCurve(point, Curve(problem), values))
        return [*curves, *self._in_flight_curves()]

    @cached_property
    def _forward_points(self) -> list[ProgramPoint]:
        """Points of the forward that need more bytes than the first of the backward."""
        first_bytes = self.points[0].min_bytes if self.points else 0
        return forward_points(self.program_points, self._backward, first_bytes)

    def _ops_before(self, point: ProgramPoint) -> list[Op]:
        """Forward ops that run before a point in every schedule, and late ops."""
        ops = [op for op in self.graph.ops if op.phase is not Phase.BACKWARD]
        if point.op.phase is Phase.BACKWARD:
            return ops
        before = set(point.before)
        return [op for op in ops if op in before or op.phase is Phase.LATE]

    def _made_after(self, point: ProgramPoint) -> frozenset[Storage]:
        """Values of the forward whose first run may follow a point, so that they cost nothing."""
        before = set(self._ops_before(point))
        return frozenset(
            storage for op in self.graph.forward_ops if op not in before for storage in op.writes
        )

    def _in_flight_curves(self) -> Iterator[_PointCurve]:
        """Further problems of the points, and one of the border, with several forwards in flight.

        Each bounds the time of every schedule as well.
        """
        if self.graph.num_in_flight == 1 or not self._backward:
            return
        for point in (self.program_points.border(), *self.points):
            problem, values = in_flight_knapsack(
                self.graph, self.costs, point, self._backward, self.forced
            )
            yield _PointCurve(point, Curve(problem), values)

    def _find_binding(self, budget_bytes: int) -> tuple[float, _PointCurve | None]:
        """The most recompute time that a point demands, and the first of such points, if any."""
        bindings = (
            (each.curve.bound_ms(budget_bytes - each.point.min_bytes), each)
            for each in self._curves
        )
        return max(bindings, key=lambda binding: binding[0], default=(0.0, None))
