"""A time that no schedule within a budget beats: the certificate that a plan is held against.

Every schedule runs each backward op once. While backward op b runs, some storages are in memory in *every* schedule: what b reads
and makes, its workspace, gradients made before b on every path and read after it, and what the user holds. What is left of the
budget holds values of the forward. A backward op that depends on b runs after b, and reads values of the forward: each of them is
either in memory while b runs, or is made again after it, which costs its op's time and needs that op's own inputs on the same
terms. The cheapest such choice is a knapsack (`rockmate/knapsack.py`), solved exactly. Its time, with every op's first run, bounds
the time of every schedule from below; so does the largest of these bounds over all moments b.

A bound is for the schedules of one graph. Where the loss block may run in chunks, each way to do so is a graph with a bound of its own,
and plans are held against the least of them (`Variants.bounds_within`).

Relaxed away: everything that happens between b and the reads, and any other moment, or any but one or two more
(`rockmate/moment_program.py`). docs/internals/algorithms.md has the proofs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations
from math import inf, isinf

import numpy as np

from checkmate import Curve
from rockmate.bound.knapsack import knapsack_of
from rockmate.bound.multi_op_program import Instant, min_recompute_ms
from rockmate.bound.solver_time import SolverTime
from rockmate.costs.cost import Costs
from rockmate.graph.in_place import reusable_operand
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate

logger = logging.getLogger("rockmate")

_MAX_MOMENTS = 12
_TIGHT = 1.1  # times the least that one moment needs: the budget for which two moments are chosen
_SECOND = 0.5  # of the budget, which a second moment has to take to be looked at
_MOST_OPS = 256  # of the forward, for which the program of two moments is written down
_MOST_OPS_RELAXED = 600  # of the forward, for which it is solved without whole numbers
_FULL_MOMENTS = 4  # second moments that are then tried
_WORTH_IT = 1e-4  # of the time of no recomputation, by which one has to lift the bound at half of the peak to be tried elsewhere
_PROGRAM_S = 10.0  # for a program of several moments: several times what it takes, so that a busy machine seldom changes the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The run of one backward op, and what is in memory then in every schedule.

    Attributes:
        op: the backward op.
        later: backward ops that depend on it, so that run after it in every schedule.
        in_use: storages that are in memory.
        num_bytes: their bytes, with the op's workspace, less what it may take over in place.
    """

    op: Op
    later: tuple[Op, ...]
    in_use: frozenset[Storage]
    num_bytes: int


class LowerBound:
    """Lower bounds on the time of one graph's schedules."""

    def __init__(
        self, graph: Graph, costs: Costs, least_ms: float, *, solver_time: SolverTime
    ) -> None:
        """Bounds for `graph`.

        Args:
            graph: ops and storages.
            costs: of its ops.
            least_ms: time of every op's first run.
            solver_time: what preparing its moments shares with others; a budget's answer may take as much again, a closer one once more.
        """
        self._graph = graph
        self._costs = costs
        self._least_ms = least_ms
        self._solver_time = solver_time
        self._known_deciding: dict[int, tuple[int, float]] = {}
        self._known_closer_ms: dict[int, float] = {}
        self._known_relaxed_ms: dict[tuple[frozenset[Op], int], float] = {}
        self._is_looseness_told = False

    def bound_ms(self, budget_bytes: int) -> float:
        """A time that no schedule of at most `budget_bytes` beats, in milliseconds; infinite if no schedule can fit."""
        deciding = self._deciding(budget_bytes)
        return self._least_ms if deciding is None else self._least_ms + deciding[1]

    def tight_bound_ms(self, budget_bytes: int) -> float:
        """As `bound_ms`, or above: near the smallest peak a second moment is looked at together with the one that decides.

        It takes a 0/1 program for that, so the search goes without. Where it is not solved in time, what is proved by then counts. At
        other budgets, and for larger graphs, linear programs of two and three moments say more where branches meet.
        """
        if budget_bytes not in self._known_closer_ms:
            again_ms = max(
                self._again_at_two_ms(budget_bytes), self._again_beside_branches_ms(budget_bytes)
            )
            self._known_closer_ms[budget_bytes] = max(
                self.bound_ms(budget_bytes), self._least_ms + again_ms
            )
        return self._known_closer_ms[budget_bytes]

    def _again_at_two_ms(self, budget_bytes: int) -> float:
        if (
            isinf(self.bound_ms(budget_bytes))
            or self._two_moments is None
            or self._two_moments[1].num_bytes < _SECOND * budget_bytes
        ):
            return 0.0
        return (
            self._solved(self._two_moments, budget_bytes)[0] if self._is_solved_where_tight else 0.0
        )

    def _again_beside_branches_ms(self, budget_bytes: int) -> float:
        """What the first moment says with each of `_full_moments`, and with the two of them that say most, without whole numbers."""
        if isinf(self.bound_ms(budget_bytes)):
            return 0.0
        return max((self._relaxed_ms(others, budget_bytes) for others in self._joined), default=0.0)

    def _relaxed_ms(self, others: tuple[Moment, ...], budget_bytes: int) -> float:
        """The least over all orders in which other moments can follow the first."""
        key = frozenset(moment.op for moment in others), budget_bytes
        if key not in self._known_relaxed_ms:
            orders = [
                order
                for order in permutations(others)
                if not any(one.op in other.later for one, other in combinations(order, 2))
            ]
            self._known_relaxed_ms[key] = min(
                self._solved((self.moments[0], *order), budget_bytes, is_relaxed=True)[0]
                for order in orders
            )
        return self._known_relaxed_ms[key]

    @cached_property
    def _joined(self) -> list[tuple[Moment, ...]]:
        """What is looked at together with the first moment, the same for every budget: one or two of `_full_moments`."""
        pairs = list(combinations(self._full_moments, 2))
        most = max(pairs, key=lambda pair: self._relaxed_ms(pair, self._half_bytes), default=None)
        return [*((moment,) for moment in self._full_moments), *([] if most is None else [most])]

    @cached_property
    def _full_moments(self) -> list[Moment]:
        """Of the moments behind the first, those with most in memory if nothing is recomputed and what need not run before them has not.

        Of equal ones the last; of these, those that say more than one moment does at half of the peak with nothing recomputed: in chains
        none. The same for every budget; none if there are too many ops.
        """
        if len(self._graph.forward_ops) > _MOST_OPS_RELAXED or not self.moments:
            return []
        later = set(self.moments[0].later)
        ops, num_bytes, num_later = self._in_use
        fullest = {
            size + self._bytes_to_read(op): op
            for op, size, after in zip(ops, num_bytes, num_later, strict=True)
            if op in later and after
        }
        full = (
            self._moment(fullest[size]) for size in sorted(fullest, reverse=True)[:_FULL_MOMENTS]
        )
        enough_ms = self.bound_ms(self._half_bytes) - self._least_ms + _WORTH_IT * self._least_ms
        return [
            moment for moment in full if self._relaxed_ms((moment,), self._half_bytes) > enough_ms
        ]

    @cached_property
    def _half_bytes(self) -> int:
        return simulate(self._graph, baseline_schedule(self._graph), self._costs).peak_bytes // 2

    def _bytes_to_read(self, op: Op) -> int:
        """Bytes of the forward's values that backward ops read which may run after `op`, what it reads itself aside."""
        before = {op, *_ancestors(op)}
        readers = (other for other in self._in_use[0] if other not in before)
        values = {
            storage for other in readers for storage in other.reads if storage not in op.reads
        }
        return sum(
            s.num_bytes
            for s in values
            if s.producer is not None and s.producer.phase is not Phase.BACKWARD
        )

    def _solved(
        self, moments: Sequence[Moment], budget_bytes: int, *, is_relaxed: bool = False
    ) -> tuple[float, bool]:
        """What has to run again where moments come in this order, and whether that is the optimum of their program."""
        instants = [
            Instant(
                op=moment.op,
                in_use=moment.in_use,
                room_bytes=budget_bytes - moment.num_bytes,
                before=_ancestors(moment.op),
                after=moment.later,
            )
            for moment in moments
        ]
        with SolverTime(self._solver_time.limit_s).for_one_solve() as time_limit_s:
            return min_recompute_ms(
                [op for op in self._graph.ops if op.phase is not Phase.BACKWARD],
                self._costs,
                instants,
                readers=self._graph.readers,
                is_relaxed=is_relaxed,
                time_limit_s=min(time_limit_s, _PROGRAM_S),
            )

    @cached_property
    def _two_moments(self) -> tuple[Moment, Moment] | None:
        """The moment that decides near the smallest peak, and of those behind it the one of most bytes.

        The same for every budget, so that the bound falls as the budget grows. None if nothing is read behind it, or if there are too
        many ops.
        """
        if len(self._graph.forward_ops) > _MOST_OPS:
            return None
        deciding = self._deciding(self._tight_bytes)
        if deciding is None:
            return None
        first = self._curves[deciding[0]][0]
        ops, num_bytes, num_later = self._in_use
        later = set(first.later)
        sizes = {
            op: size
            for op, size, after in zip(ops, num_bytes, num_later, strict=True)
            if op in later and after
        }
        if not sizes:
            return None
        return first, self._moment(max(sizes, key=sizes.__getitem__))

    @property
    def _tight_bytes(self) -> int:
        return int(_TIGHT * self.peak_bound_bytes)

    @cached_property
    def _is_solved_where_tight(self) -> bool:
        """Whether the program of two moments is solved in time near the smallest peak; if not, it is not asked again."""
        assert self._two_moments is not None
        is_solved = self._solved(self._two_moments, self._tight_bytes)[1]
        if not is_solved:
            logger.info(
                "the lower bound looks at one moment at a time: the program of two was not solved in %.1f s",
                _PROGRAM_S,
            )
        return is_solved

    def saved_values_within(self, budget_bytes: int) -> frozenset[Storage] | None:
        """Values of the forward in memory at the moment that gives the bound of `budget_bytes`; None if no schedule can fit.

        A schedule that keeps them until then and makes the rest again once takes the bound's time, if it fits.
        """
        deciding = self._deciding(budget_bytes)
        if deciding is None:
            return None
        moment, curve, values = self._curves[deciding[0]]
        with SolverTime(self._solver_time.limit_s).for_one_solve() as time_limit_s:
            plan = curve.plan(budget_bytes - moment.num_bytes, time_limit_s=time_limit_s)
        if plan is None:
            return None
        kept = {*moment.in_use, *(values[value] for value in plan.saved if value < len(values))}
        return frozenset(
            storage
            for storage in kept
            if storage.producer is not None and storage.producer.phase is Phase.FORWARD
        )

    def _deciding(self, budget_bytes: int) -> tuple[int, float] | None:
        """Which moment gives the bound, the first of equal ones, and what has to run again there; None if there are no moments."""
        if not self._curves:
            return None
        if budget_bytes not in self._known_deciding:
            self._known_deciding[budget_bytes] = self._newly_deciding(budget_bytes)
        return self._known_deciding[budget_bytes]

    def _newly_deciding(self, budget_bytes: int) -> tuple[int, float]:
        """Asks moments in order of what they could say at most, until no other could say more."""
        solver_time = SolverTime(self._solver_time.limit_s)
        most_ms = [
            curve.hull_plan_ms(budget_bytes - moment.num_bytes) for moment, curve, _ in self._curves
        ]
        decided, decided_ms = 0, -inf
        for index in sorted(range(len(most_ms)), key=most_ms.__getitem__, reverse=True):
            if most_ms[index] < decided_ms:
                break
            moment, curve, _ = self._curves[index]
            with solver_time.for_one_solve() as time_limit_s:
                again_ms = curve.bound_ms(
                    budget_bytes - moment.num_bytes, time_limit_s=time_limit_s
                )
            if (again_ms, -index) > (decided_ms, -decided):
                decided, decided_ms = index, again_ms
        self._tell_looseness()
        return decided, decided_ms

    def _tell_looseness(self) -> None:
        num_cut_short = self.num_cut_short
        if num_cut_short and not self._is_looseness_told:
            self._is_looseness_told = True
            logger.warning(
                "the lower bound is from convex hulls at %d moments; raise time_limit_s for a closer one",
                num_cut_short,
            )

    @property
    def num_cut_short(self) -> int:
        """At how many moments a time limit has left the convex hull to answer so far."""
        return (
            sum(curve.is_cut_short for _, curve, _ in self._curves)
            if "_curves" in self.__dict__
            else 0
        )

    @property
    def peak_bound_bytes(self) -> int:
        """A peak that no schedule is below."""
        return max((moment.num_bytes for moment in self.moments), default=0)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Moments that need more bytes than every moment before them, and the one that needs most.

        What comes later leaves less to recompute. A moment with nothing after it only tells whether there is a schedule at all.
        """
        ops, num_bytes, num_later = self._in_use
        rising: list[Op] = []
        most = -1
        for position, op in enumerate(ops):
            if num_later[position] and num_bytes[position] > most:
                rising.append(op)
                most = num_bytes[position]
        step = max(1, -(-len(rising) // _MAX_MOMENTS))
        chosen = rising[::-1][::step][::-1]
        if ops and max(num_bytes) > most:
            chosen.append(ops[int(np.argmax(num_bytes))])
        return tuple(map(self._moment, chosen))

    @cached_property
    def _in_use(self) -> tuple[list[Op], list[int], list[int]]:
        """The backward ops in order, and for the moment of each the bytes in memory in every schedule and how many ops depend on it."""
        runs = baseline_schedule(
            self._graph
        ).backward  # an op that is no part of the step has no moment
        ops = [
            self._graph.ops[index]
            for index in runs
            if self._graph.ops[index].phase is Phase.BACKWARD
        ]
        place = {op: position for position, op in enumerate(ops)}
        follows = np.eye(len(ops), dtype=bool)  # [a, b]: b is a, or depends on it
        readers = {
            s: [place[r] for r in self._graph.readers.get(s, ()) if r in place]
            for op in ops
            for s in op.writes
        }
        for position in range(len(ops) - 1, -1, -1):
            for storage in ops[position].writes:
                for reader in readers[storage]:
                    follows[position] |= follows[reader]
        precedes = np.ascontiguousarray(follows.T)
        waiting = np.zeros(len(ops), dtype=np.int64)  # gradients made before and read after
        for storage, positions in readers.items():
            assert storage.producer is not None
            made = follows[place[storage.producer]].copy()
            read = (
                np.logical_or.reduce([precedes[position] for position in positions], axis=0)
                if positions
                else False
            )
            made &= storage.is_kept_to_end | np.asarray(read)
            made[[place[storage.producer], *positions]] = False  # counted with the op's own
            waiting[made] += storage.num_bytes
        held = [
            storage for storage in self._graph.storages if storage.is_output or storage.is_tangent
        ]
        num_bytes = []
        for position, op in enumerate(ops):
            own = {*op.reads, *op.writes}
            elsewhere = sum(storage.num_bytes for storage in held if storage not in own)
            num_bytes.append(self._own_bytes(op) + elsewhere + int(waiting[position]))
        return ops, num_bytes, (follows.sum(axis=1) - 1).tolist()

    @cached_property
    def _curves(self) -> list[tuple[Moment, Curve, list[Storage]]]:
        ops = [op for op in self._graph.ops if op.phase is not Phase.BACKWARD]
        curves = []
        for moment in self.moments:
            problem, values = knapsack_of(
                ops, moment.later, self._costs, at_hand=moment.in_use, with_states=True
            )
            with self._solver_time.for_one_solve() as time_limit_s:
                curves.append((moment, Curve(problem, time_limit_s=time_limit_s), values))
        return curves

    def _own_bytes(self, op: Op) -> int:
        own = {storage for storage in (*op.reads, *op.writes) if not storage.is_static}
        may_work_in_place = reusable_operand(self._graph, op, list(op.reads)) is not None
        taken = op.writes[0].num_bytes if may_work_in_place else 0
        return (
            sum(storage.num_bytes for storage in own)
            + self._costs.first[op.index].overhead_bytes
            - taken
        )

    def _moment(self, op: Op) -> Moment:
        before, later = _ancestors(op), _descendants(self._graph, op)
        in_use = {
            storage for storage in self._graph.storages if storage.is_output or storage.is_tangent
        }
        in_use.update(storage for storage in (*op.reads, *op.writes) if not storage.is_static)
        for earlier in before:
            in_use.update(
                s
                for s in earlier.writes
                if s.is_kept_to_end or not later.isdisjoint(self._graph.readers.get(s, ()))
            )
        own = {*op.reads, *op.writes}
        num_bytes = self._own_bytes(op) + sum(
            storage.num_bytes for storage in in_use if storage not in own
        )
        return Moment(op=op, later=_in_order(later), in_use=frozenset(in_use), num_bytes=num_bytes)


def _ancestors(op: Op) -> set[Op]:
    """Backward ops that `op` depends on through gradients, none of which can run twice."""
    found: set[Op] = set()
    pending = [op]
    while pending:
        for storage in pending.pop().reads:
            producer = storage.producer
            if producer is not None and producer.phase is Phase.BACKWARD and producer not in found:
                found.add(producer)
                pending.append(producer)
    return found


def _descendants(graph: Graph, op: Op) -> set[Op]:
    found: set[Op] = set()
    pending = [op]
    while pending:
        for storage in pending.pop().writes:
            new = [reader for reader in graph.readers.get(storage, ()) if reader not in found]
            found.update(new)
            pending += new
    return found


def _in_order(ops: Iterable[Op]) -> tuple[Op, ...]:
    return tuple(sorted(ops, key=lambda op: op.index))
