"""The staged form of Checkmate as numbers: a whole step, recomputation and its order, and a bound on the peak.

The *ops* of a step, forward and backward, stand in one topological list; each makes *values*. A schedule (`steps`)
is a list of op runs. Every op that is needed runs at least once, the first runs in the order of the list, and an
op that is `recomputable` may run again. A read takes the value of its maker's latest run. What is freed when
follows from the order: a value is **live** from the run that makes it until its last read before it is made anew;
one that nobody reads before then ends with the run that made it. A value that *stays* is live from its first run to
the end, and it is that one that is read; a further run of its maker makes a copy that ends with that run. A value
that no op makes is *given* and never counted. While an op runs there are in use the live values, its inputs and outputs
among them, and its own overhead; the largest such sum is the **peak**.

**Stage** t begins when the op before t has run for the first time and ends with the first run of op t. In a *staged*
schedule each op runs at most once in a stage, in the order of the list. That is the family of Jain et al.,
"Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, with its frontier-advancing
stages. Wanted: the staged schedule of least time whose peak is within a budget.

Not done here: another order of first runs, recomputing twice within a stage or in another order there, work in
place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, inf

from checkmate.problem import Op, Status, check_ops, check_values


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedOp(Op):
    """One op of a step, of its forward or its backward.

    Attributes:
        overhead_bytes: Bytes in use while it runs beside its inputs and outputs.
        needed: Whether it must run even if nobody reads what it makes (it hands a gradient over, say).
    """

    overhead_bytes: int = 0
    needed: bool = False


@dataclass(frozen=True, kw_only=True)
class StagedProblem:
    """A step to be scheduled; see the module's docstring.

    Attributes:
        ops: The ops in topological order, which is the order of their first runs.
        value_bytes: Size of each value in bytes; a value that no op makes is given, and its size is never counted.
        stays: Values that someone else holds once they are made; their makers are needed.

    Raises:
        ValueError: An index, size or time is out of range, a value has two makers, or the order is not topological.
    """

    ops: tuple[StagedOp, ...]
    value_bytes: tuple[int, ...]
    stays: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Check every index, size, time and the order."""
        check_ops(self.ops, self.value_bytes)
        check_values(self.stays, len(self.value_bytes), "stays")
        for index, op in enumerate(self.ops):
            if not isinstance(op.overhead_bytes, int) or op.overhead_bytes < 0:
                raise ValueError(
                    f"op {index} has an overhead of {op.overhead_bytes!r} bytes; a whole number (int) of at least 0 is needed"
                )

    @cached_property
    def maker(self) -> dict[int, int]:
        """The op that makes each value that is not given."""
        return {value: index for index, op in enumerate(self.ops) for value in op.outputs}

    @cached_property
    def needed_ops(self) -> tuple[int, ...]:
        """The ops that must run, in order: `needed`, makers of values that stay, and whatever those read."""
        wanted = set(self.stays)
        needed = []
        for index in reversed(range(len(self.ops))):
            op = self.ops[index]
            if op.needed or not wanted.isdisjoint(op.outputs):
                needed.append(index)
                wanted.update(op.inputs)
        return tuple(reversed(needed))

    @property
    def least_time_ms(self) -> float:
        """Sum of all first runs, below which no schedule is."""
        return time_of(self, self.needed_ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSolution:
    """A schedule and what is proven of it.

    Attributes:
        status: How much is proven, of staged schedules, and of those under the restriction where there is one.
        steps: Op indices in running order; empty where there is no schedule.
        time_ms: Sum over all runs, in milliseconds; infinite where there is no schedule.
        peak_bytes: The schedule's peak in bytes.
        bound_ms: No staged schedule within the budget (and the restriction) is faster: `time_ms` where that is proven
            optimal (to about 1e-9 of all first runs' time, the solvers' tolerance), the solver's dual bound where it stopped
            early, infinite where there is proven to be no schedule.
        first_recompute_op: The restriction under which this holds: nothing is recomputed in the stage of an earlier op.
            0 for none.
    """

    status: Status
    steps: tuple[int, ...]
    time_ms: float
    peak_bytes: int
    bound_ms: float
    first_recompute_op: int = 0

    @property
    def found(self) -> bool:
        """Whether there is a schedule at all."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)


def no_schedule(
    status: Status, bound_ms: float = inf, first_recompute_op: int = 0
) -> StagedSolution:
    """An answer without a schedule, for `Status.INFEASIBLE` and `Status.NOT_FOUND`."""
    return StagedSolution(
        status=status,
        steps=(),
        time_ms=inf,
        peak_bytes=0,
        bound_ms=bound_ms,
        first_recompute_op=first_recompute_op,
    )


def time_of(problem: StagedProblem, steps: Sequence[int]) -> float:
    """Sum of the times of all runs, in milliseconds."""
    return fsum(problem.ops[index].time_ms for index in steps)


def without_idle_runs(problem: StagedProblem, steps: Sequence[int]) -> tuple[int, ...]:
    """The steps less each further run of an op of which nothing is read before it is made anew."""
    first = first_runs(steps)
    wanted: set[int] = set()
    kept = []
    for position in reversed(range(len(steps))):
        op = problem.ops[steps[position]]
        made = set(op.outputs) - problem.stays
        if first[steps[position]] != position and wanted.isdisjoint(made):
            continue
        kept.append(steps[position])
        wanted -= made
        wanted.update(op.inputs)
    return tuple(reversed(kept))


def live_values(problem: StagedProblem, steps: Sequence[int]) -> list[frozenset[int]]:
    """The values in use while each run of `steps` runs."""
    first = first_runs(steps)
    live = [frozenset[int]()] * len(steps)
    wanted = {
        value for value in problem.stays if value in problem.maker
    }  # live after the run at hand
    for position in reversed(range(len(steps))):
        op = problem.ops[steps[position]]
        wanted.update(value for value in op.inputs if value in problem.maker)
        live[position] = frozenset(wanted.union(op.outputs))
        is_first = first[steps[position]] == position
        wanted.difference_update(op.outputs if is_first else set(op.outputs) - problem.stays)
    return live


def used_bytes(problem: StagedProblem, steps: Sequence[int]) -> list[int]:
    """What is in use while each run of `steps` runs, in bytes; its largest is the peak."""
    first = first_runs(steps)
    used = []
    for position, (index, live) in enumerate(zip(steps, live_values(problem, steps), strict=True)):
        op = problem.ops[index]
        copies = (
            problem.stays.intersection(op.outputs) if first[index] < position else frozenset[int]()
        )
        used.append(
            sum(problem.value_bytes[value] for value in (*live, *copies)) + op.overhead_bytes
        )
    return used


def first_runs(steps: Sequence[int]) -> dict[int, int]:
    """The position of each op's first run."""
    first: dict[int, int] = {}
    for position, index in enumerate(steps):
        first.setdefault(index, position)
    return first
