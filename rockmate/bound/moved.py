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

from collections.abc import Mapping, Sequence
from functools import cache
from math import inf

from checkmate import Knapsack, Status
from checkmate.backend import Outcome, Program, Variable
from rockmate.bound.knapsack import knapsack_of
from rockmate.bound.lower_bound import LowerBound
from rockmate.graph.ir import Phase, Storage
from rockmate.schedule.move import movable_storages
from rockmate.schedule.offload_request import OffloadRequest

# A share that a solver's tolerance may have made.
_LEAST = 1e-6
# Slack of the byte limits, and the share of the total time deducted from the optimum: above the
# solvers' own tolerances, which must not cut off a schedule.
_TOLERANCE = 1e-6
# The total time in a program. Solvers stop within an absolute 1e-6 of the optimum.
_SCALED_TOTAL = 1e4
# Seconds for one program. This is several times what one takes, so that a busy machine seldom
# changes the answer.
_TIME_LIMIT_S = 10.0


class MovedBound:
    """The bounds of one graph whose values may move, at the points of its bounds without moves."""

    def __init__(self, unmoved: LowerBound, request: OffloadRequest) -> None:
        self._unmoved, self._request = unmoved, request
        self._within = cache(self._solved)

    def bound_ms(self, budget_bytes: int) -> float:
        """See `LowerBound.bound_ms`."""
        if budget_bytes < max((point.min_bytes for point in self._unmoved.points), default=0):
            return inf
        return self._within(budget_bytes)[0]

    def moved_values(self, budget_bytes: int) -> frozenset[int]:
        """Indices of storages that take the bytes that the relaxation of the first point moves.

        They are those of which it moves most.
        """
        return self._within(budget_bytes)[1]

    def _solved(self, budget_bytes: int) -> tuple[float, frozenset[int]]:
        """The bound of a budget, and what moves at the first point."""
        bound, base_ms, link = self._unmoved, self._unmoved.base_ms, self._unmoved.costs.link
        if not bound.points:
            return base_ms, frozenset()
        point = bound.points[0]
        room_bytes = budget_bytes - point.min_bytes
        if room_bytes < 0:
            return inf, frozenset()
        ops = [op for op in bound.graph.ops if op.phase is not Phase.BACKWARD]
        problem, values = knapsack_of(
            ops, point.after, bound.costs, available=point.live, with_states=True, free=bound.forced
        )
        program = _PointProgram(problem, self._movable(values), base_ms)
        program.limit_bytes(room_bytes, self._request.host_bytes)
        times_ms = [each.time_ms for each in bound.costs.first]
        before = [op for op in bound.graph.ops if op.phase is Phase.FORWARD]
        before_ms = sum(times_ms[op.index] for op in (*before, *point.before))
        after_ms = sum(times_ms[op.index] for op in (point.op, *point.after))
        assert link is not None
        out_ms, in_ms = (1e-6 / rate for rate in (link.out_gb_per_s, link.in_gb_per_s))
        program.limit_time(base_ms, has_runs=True)
        program.limit_time(before_ms, byte_ms=in_ms)
        program.limit_time(after_ms, byte_ms=out_ms, has_runs=True)
        program.limit_time(0.0, byte_ms=out_ms + in_ms)
        least_ms, moved = program.least()
        return max(base_ms, least_ms), frozenset(values[i].index for i in moved)

    def _movable(self, values: Sequence[Storage]) -> list[int]:
        """Those of the values that the forward makes and that may move."""
        allowed = movable_storages(self._unmoved.graph, self._request.device_type)
        return [
            number
            for number, storage in enumerate(values)
            if storage.index in allowed and storage.phase is Phase.FORWARD
        ]


class _PointProgram:
    """The linear program of one point: shares of values saved and moved, and of ops that run again.

    Tolerances refer to the total time.
    """

    def __init__(self, problem: Knapsack, movable: Sequence[int], total_ms: float) -> None:
        self._problem, self._program = problem, Program()
        self._scale = _SCALED_TOTAL / max(total_ms, 1e-9)
        self._tolerance_ms = _TOLERANCE * total_ms
        variable = self._program.variable
        self._saved = {value: variable() for value in range(len(problem.value_bytes))}
        self._moved = {value: variable() for value in movable}
        self._runs = {i: variable() for i, op in enumerate(problem.ops) if op.recomputable}
        self._time = variable(1.0, most=inf)
        self._demand_reads()

    def _demand_reads(self) -> None:
        """Demands what is read behind the point, and what a recomputation reads."""
        makers: dict[int, list[Variable]] = {value: [each] for value, each in self._saved.items()}
        for index, run in self._runs.items():
            for value in self._problem.ops[index].outputs:
                makers[value].append(run)
        for value, each in self._moved.items():
            makers[value].append(each)
        for value in self._problem.required:
            self._program.at_most(dict.fromkeys(makers[value], -1.0), -1.0)
        for index, run in self._runs.items():
            for value in self._problem.ops[index].inputs:
                self._program.at_most({run: 1.0, **dict.fromkeys(makers[value], -1.0)}, 0.0)

    def limit_bytes(self, room_bytes: int, host_bytes: int | None) -> None:
        """Limits what is saved, and what is moved."""
        self._limit(self._saved, room_bytes)
        if host_bytes is not None:
            self._limit(self._moved, host_bytes)

    def _limit(self, shares: Mapping[int, Variable], limit_bytes: int) -> None:
        scale = 1 / max(limit_bytes, 1)
        sizes = self._problem.value_bytes
        row = {each: sizes[value] * scale for value, each in shares.items()}
        self._program.at_most(row, limit_bytes * scale + _TOLERANCE)

    def limit_time(self, own_ms: float, *, byte_ms: float = 0.0, has_runs: bool = False) -> None:
        """Has the time be at least that of some ops, of moved bytes, and of recomputations."""
        row = {self._time: -1.0}
        sizes, ops = self._problem.value_bytes, self._problem.ops
        row |= {each: sizes[i] * byte_ms * self._scale for i, each in self._moved.items()}
        for i, run in self._runs.items() if has_runs else ():
            row[run] = ops[i].time_ms * self._scale
        self._program.at_most(row, -own_ms * self._scale)

    def least(self) -> tuple[float, list[int]]:
        """The least time, infinite if nothing satisfies the rows, and the values that it moves.

        If the limit ends the solve, what the solver has proved counts, or 0.
        """
        outcome = self._program.solve(_TIME_LIMIT_S)
        if outcome.status is Status.INFEASIBLE:
            return inf, []
        return max(0.0, outcome.bound / self._scale - self._tolerance_ms), self._moved_most(outcome)

    def _moved_most(self, outcome: Outcome) -> list[int]:
        """Values of as many bytes as it moves: of equal layers it may move a part of each."""
        if not outcome.values:
            return []
        sizes = self._problem.value_bytes
        shares = {value: outcome.value(each) for value, each in self._moved.items()}
        left, chosen = sum(sizes[value] * share for value, share in shares.items()), list[int]()
        for value in sorted(shares, key=lambda value: -shares[value]):
            if shares[value] > _LEAST and sizes[value] <= left * (1 + _LEAST):
                chosen.append(value)
                left -= sizes[value]
        return chosen
