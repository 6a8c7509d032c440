"""A lower bound on the time of every schedule that may also move values to another memory tier.

**Problem.** As for `bound.lower_bound`, and values of the forward may leave memory and come back.

**Relaxation.** One program point b, as there. Each value that is read after b is live at b, or
recomputed after it, or comes back after it. In the last case it has gone before b. So with C the
least compute time before b and R that of b and behind it, recomputations Q behind b, and Y bytes
that come back behind b,

    time >= baseline + Q,   C + Y / in,   Y / out + R + Q,   Y / out + Y / in

and the least time is that of a linear program over what is live, recomputed and moved, without
whole numbers. Latencies, memory behind b, and that a lane may have to wait are left out.

**Complexity.** One linear program for a point and a budget: about a variable for each op and two
for each value. It is solved for the first point; more points lifted no bound (decision 29).

The proof is in docs/internals/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from weakref import WeakKeyDictionary

import pulp

from checkmate import Knapsack, Status
from checkmate.backend import run
from rockmate.bound.knapsack import knapsack_of
from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.program_point import ProgramPoint
from rockmate.costs.cost import Link
from rockmate.graph.ir import Phase
from rockmate.schedule.bounds import Bounds, MinBound
from rockmate.schedule.move import movable_storages

# A share that a solver's tolerance may have made.
_LEAST = 1e-6
# Slack of the byte limits, and the share of the total time deducted from the optimum: above the
# solvers' own tolerances.
_TOLERANCE = 1e-6
# The total time in a program. Solvers stop within an absolute 1e-6 of the optimum.
_SCALED_TOTAL = 1e4
# Seconds for one program. This is several times what one takes, so that a busy machine seldom
# changes the answer.
_TIME_LIMIT_S = 10.0


def with_moves(bounds: Bounds, movable: str, host_bytes: int | None) -> Bounds:
    """Bounds that hold with moves too, of the same graphs.

    Args:
        bounds: without moves.
        movable: type of the devices whose values may move.
        host_bytes: most bytes in the other tier; None for no limit.
    """
    if isinstance(bounds, MinBound):
        return MinBound(lambda: [with_moves(each, movable, host_bytes) for each in bounds.each()])
    if not isinstance(bounds, LowerBound):
        return bounds
    known = _OF_BOUND.setdefault(bounds, {})
    if (movable, host_bytes) not in known:
        known[movable, host_bytes] = MovedBound(bounds, movable, host_bytes)
    return known[movable, host_bytes]


class MovedBound:
    """The bounds of one graph whose values may move.

    Args:
        unmoved: the bounds without moves, whose points are used.
        movable: type of the devices whose values may move.
        host_bytes: most bytes in the other tier; None for no limit.
    """

    def __init__(self, unmoved: LowerBound, movable: str, host_bytes: int | None) -> None:
        self._unmoved = unmoved
        self._movable, self._host_bytes = movable, host_bytes
        self._known: dict[int, tuple[float, frozenset[int]]] = {}

    def bound_ms(self, budget_bytes: int) -> float:
        """See `Bounds.bound_ms`."""
        if budget_bytes < max((point.min_bytes for point in self._unmoved.points), default=0):
            return inf
        return self._within(budget_bytes)[0]

    def moved_values(self, budget_bytes: int) -> frozenset[int]:
        """Indices of storages that take the bytes that the relaxation of the first point moves.

        They are those of which it moves most.

        Args:
            budget_bytes: the budget.
        """
        return self._within(budget_bytes)[1]

    def _within(self, budget_bytes: int) -> tuple[float, frozenset[int]]:
        """The bound of a budget, and what moves at the first point."""
        if not self._unmoved.points:
            return self._unmoved.base_ms, frozenset()
        if budget_bytes not in self._known:
            point = self._unmoved.points[0]
            program = _PointProgram(self._unmoved, point, self._movable)
            least_ms = program.least_ms(budget_bytes - point.min_bytes, self._host_bytes)
            self._known[budget_bytes] = least_ms, program.moved
        return self._known[budget_bytes]


_OF_BOUND: WeakKeyDictionary[LowerBound, dict[tuple[str, int | None], MovedBound]]
_OF_BOUND = WeakKeyDictionary()


class _PointProgram:
    """The linear program of one point.

    Attributes:
        moved: indices of storages, see `MovedBound.moved_values`.
    """

    def __init__(self, bound: LowerBound, point: ProgramPoint, movable: str) -> None:
        graph, costs = bound.graph, bound.costs
        assert costs.link is not None
        self._link: Link = costs.link
        self._base_ms = bound.base_ms
        first = costs.first
        before = [op for op in graph.ops if op.phase is Phase.FORWARD]
        self._before_ms = sum(first[op.index].time_ms for op in (*before, *point.before))
        self._after_ms = sum(first[op.index].time_ms for op in (point.op, *point.after))
        ops = [op for op in graph.ops if op.phase is not Phase.BACKWARD]
        self._problem, values = knapsack_of(
            ops, point.after, costs, available=point.live, with_states=True, free=bound.forced
        )
        allowed = movable_storages(graph, movable)
        self._values = values
        self.moved: frozenset[int] = frozenset()
        self._movable = [
            index
            for index, storage in enumerate(values)
            if storage.index in allowed
            and storage.producer is not None
            and storage.producer.phase is Phase.FORWARD
        ]

    def least_ms(self, room_bytes: int, host_bytes: int | None) -> float:
        """The least time with so many bytes of the forward's values in memory at the point."""
        if room_bytes < 0:
            return inf
        problem, program = self._problem, _LinearProgram(self._base_ms)
        rows, scale = program.rows, program.scale
        saved = [program.variable(f"s{i}") for i in range(len(problem.value_bytes))]
        moved = {i: program.variable(f"m{i}") for i in self._movable}
        runs = {i: program.variable(f"r{i}") for i, op in enumerate(problem.ops) if op.recomputable}
        sizes = zip(problem.value_bytes, saved, strict=True)
        program.limit_bytes(pulp.lpSum(size * each for size, each in sizes), room_bytes)
        _demand_reads(rows, problem, saved, moved, runs)
        recompute_ms = pulp.lpSum(problem.ops[i].time_ms * scale * run for i, run in runs.items())
        moved_bytes = pulp.lpSum(problem.value_bytes[i] * each for i, each in moved.items())
        if host_bytes is not None:
            program.limit_bytes(moved_bytes, host_bytes)
        out_ms = moved_bytes * (1e-6 * scale / self._link.out_gb_per_s)
        in_ms = moved_bytes * (1e-6 * scale / self._link.in_gb_per_s)
        time_ms = rows.add_variable("time", 0)
        rows.setObjective(1 * time_ms)
        rows += time_ms >= self._base_ms * scale + recompute_ms
        rows += time_ms >= self._before_ms * scale + in_ms
        rows += time_ms >= self._after_ms * scale + recompute_ms + out_ms
        rows += time_ms >= out_ms + in_ms
        least_ms = program.least_ms()
        if least_ms < inf:
            sizes = problem.value_bytes
            shares = {i: each.value() or 0.0 for i, each in moved.items()}
            # As many bytes as it moves: of equal layers it may move a part of each.
            left, chosen = sum(sizes[i] * share for i, share in shares.items()), list[int]()
            for i in sorted(shares, key=lambda i: -shares[i]):
                if shares[i] > _LEAST and sizes[i] <= left * (1 + _LEAST):
                    chosen.append(self._values[i].index)
                    left -= sizes[i]
            self.moved = frozenset(chosen)
        return max(self._base_ms, least_ms)


def _demand_reads(
    program: pulp.LpProblem,
    problem: Knapsack,
    saved: Sequence[pulp.LpVariable],
    moved: dict[int, pulp.LpVariable],
    runs: dict[int, pulp.LpVariable],
) -> None:
    """Demands what is read behind the point, and what a recomputation reads."""
    makers: dict[int, list[int]] = {}
    for index, op in enumerate(problem.ops):
        for value in op.outputs if index in runs else ():
            makers.setdefault(value, []).append(index)

    def available(value: int) -> pulp.LpAffineExpression:
        made = [runs[index] for index in makers.get(value, ())]
        return pulp.lpSum([saved[value], *made, *([moved[value]] if value in moved else [])])

    for value in problem.required:
        program += available(value) >= 1
    for index, op in enumerate(problem.ops):
        for value in op.inputs if index in runs else ():
            program += available(value) >= runs[index]


class _LinearProgram:
    """Variables between 0 and 1, rows, and the least time.

    A solver's tolerances must not cut off a schedule. So byte limits are a little loose, and a
    little is deducted from the optimum.

    Args:
        total_ms: the time that the tolerance refers to.

    Attributes:
        rows: the program in PuLP; times in it are multiplied by `scale`.
        scale: of times.
    """

    def __init__(self, total_ms: float) -> None:
        self.rows = pulp.LpProblem("bound", pulp.LpMinimize)
        self.scale = _SCALED_TOTAL / max(total_ms, 1e-9)
        self._tolerance_ms = _TOLERANCE * total_ms

    def variable(self, name: str) -> pulp.LpVariable:
        """A variable between 0 and 1."""
        return self.rows.add_variable(name, 0, 1)

    def limit_bytes(self, total: pulp.LpAffineExpression, room_bytes: int) -> None:
        """Limits a sum of bytes, in shares of the room, with the tolerance as slack."""
        scale = 1 / max(room_bytes, 1)
        self.rows += total * scale <= max(room_bytes, 0) * scale + _TOLERANCE

    def least_ms(self) -> float:
        """The least time; infinite if nothing satisfies the rows.

        If the limit ends the solve, what the solver has proved counts, or 0.
        """
        outcome = run(self.rows, _TIME_LIMIT_S)
        if outcome.status is Status.INFEASIBLE:
            return inf
        return max(0.0, outcome.bound / self.scale - self._tolerance_ms)
