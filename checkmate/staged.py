"""The staged form of Checkmate as numbers: a whole step, recomputed in stages, within a peak.

The *ops* of a step, forward and backward, stand in one topological list. Each makes *values*. A
schedule (`steps`) is a list of op runs. Every op runs at least once, first runs are in the order of
the list, and a `recomputable` op may run more often. A read takes the value of its maker's
latest run.

Live intervals follow from the order. A value is **live** from a run of its maker to the last read
before the next run. Without a read in between, it ends with the run that made it. A *held* value is
live from its first run to the end, and all reads take that one. Another run of its maker makes a
copy that ends with that run. A value that no op makes is *given* and never counted. While an op
runs, the live values, its inputs and outputs among them, and its own overhead are in use. The
largest such sum is the **peak**.

**Stage** t begins when the op before t has run for the first time and ends with the first run of op
t. In a *staged* schedule, each op runs at most once in a stage, in the order of the list. That is
the family of Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", MLSys 2020, with its frontier-advancing stages. The problem: the staged schedule
of least time whose peak is within a budget.

Not done here: another order of first runs, two recomputations of one op within a stage, another
order within a stage, reuse of memory in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, inf

from checkmate.problem import Op, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedOp(Op):
    """One op of a step, of its forward or its backward.

    Attributes:
        overhead_bytes: Bytes in use while it runs, beside its inputs and outputs.
    """

    overhead_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StagedProblem:
    """A step to be scheduled; see the module's docstring.

    Attributes:
        ops: The ops in topological order, which is the order of their first runs.
        value_bytes: Size of each value in bytes; a value that no op makes is given, and its size is
            never counted.
        held: Values that are held from outside once they are made.
    """

    ops: tuple[StagedOp, ...]
    value_bytes: tuple[int, ...]
    held: frozenset[int] = frozenset()

    @cached_property
    def maker(self) -> dict[int, int]:
        """The op that makes each value that is not given."""
        return {value: index for index, op in enumerate(self.ops) for value in op.outputs}

    @property
    def min_time_ms(self) -> float:
        """The time of all first runs, a lower bound on every schedule's time."""
        return time_of(self, range(len(self.ops)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSolution:
    """A schedule and its proven bound.

    Attributes:
        status: How much is proven among staged schedules, under the restriction if there is one.
        steps: Op indices in running order; empty if there is no schedule.
        time_ms: Sum over all runs, in milliseconds; infinite if there is no schedule.
        peak_bytes: The schedule's peak in bytes; 0 if there is none.
        bound_ms: A lower bound on the time of staged schedules within the budget and the
            restriction. It is `time_ms` if that is proven optimal, to about 1e-9 of all first runs'
            time, the solvers' tolerance. It is the solver's dual bound if the solver stopped early,
            and infinite if there is proven to be no schedule.
    """

    status: Status
    steps: tuple[int, ...] = ()
    time_ms: float = inf
    peak_bytes: int = 0
    bound_ms: float = inf

    @property
    def found(self) -> bool:
        """Whether there is a schedule at all."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)


def time_of(problem: StagedProblem, steps: Sequence[int]) -> float:
    """Sum of the times of all runs, in milliseconds."""
    return fsum(problem.ops[index].time_ms for index in steps)


def without_dead_runs(problem: StagedProblem, steps: Sequence[int]) -> tuple[int, ...]:
    """The steps without dead recomputations, whose outputs are not read before the next run."""
    first = first_runs(steps)
    wanted: set[int] = set()
    kept = []
    for position in reversed(range(len(steps))):
        op = problem.ops[steps[position]]
        made = set(op.outputs) - problem.held
        if first[steps[position]] != position and wanted.isdisjoint(made):
            continue
        kept.append(steps[position])
        wanted -= made
        wanted.update(op.inputs)
    return tuple(reversed(kept))


def live_values(problem: StagedProblem, steps: Sequence[int]) -> list[frozenset[int]]:
    """The values in use during each run."""
    first = first_runs(steps)
    live = [frozenset[int]()] * len(steps)
    # Values that are live after the run of the loop's position.
    wanted = {value for value in problem.held if value in problem.maker}
    for position in reversed(range(len(steps))):
        op = problem.ops[steps[position]]
        wanted.update(value for value in op.inputs if value in problem.maker)
        live[position] = frozenset(wanted.union(op.outputs))
        is_first = first[steps[position]] == position
        wanted.difference_update(op.outputs if is_first else set(op.outputs) - problem.held)
    return live


def in_use_bytes(problem: StagedProblem, steps: Sequence[int]) -> list[int]:
    """The bytes in use during each run; the largest is the peak."""
    first = first_runs(steps)
    used = []
    for position, (index, live) in enumerate(zip(steps, live_values(problem, steps), strict=True)):
        op = problem.ops[index]
        copies = problem.held.intersection(op.outputs if first[index] < position else ())
        sizes = (problem.value_bytes[value] for value in (*live, *copies))
        used.append(sum(sizes) + op.overhead_bytes)
    return used


def first_runs(steps: Sequence[int]) -> dict[int, int]:
    """The position of each op's first run."""
    first: dict[int, int] = {}
    for position, index in enumerate(steps):
        first.setdefault(index, position)
    return first
