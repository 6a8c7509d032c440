"""Independent checks of a plan and of a schedule, by replaying them; no code of the solvers.

The replay of a plan goes over the recomputed ops in order, with the set of available values. That
of a schedule goes forward in time, run by run: it finds the run that made each value that is read,
and counts the value from that run to its last read. Both add up bytes and times themselves. They
prove that an answer is *valid* and its costs true, not that it is optimal.
"""

from collections.abc import Sequence
from math import fsum, isclose

from checkmate.problem import Knapsack, Op, Solution
from checkmate.staged import StagedProblem, StagedSolution


def verify(problem: Knapsack, solution: Solution) -> None:
    """Check that a plan makes every required value available at the stated cost.

    Args:
        problem: The problem.
        solution: A plan for it.

    Raises:
        ValueError: The plan is wrong. The text names the op or value and the rule it breaks.
    """
    _check_saved(problem, solution)
    _check_recomputed(problem, solution)
    saved_bytes = sum(problem.value_bytes[value] for value in solution.saved - problem.forced)
    if saved_bytes != solution.saved_bytes:
        raise ValueError(
            f"saved_bytes is {solution.saved_bytes}, but the saved values have {saved_bytes} bytes"
        )
    _check_time(solution, [problem.ops[index] for index in solution.recomputed])


def _given(problem: Knapsack | StagedProblem) -> set[int]:
    """The values that no op makes."""
    given = set(range(len(problem.value_bytes)))
    for op in problem.ops:
        given.difference_update(op.outputs)
    return given


def _check_saved(problem: Knapsack, solution: Solution) -> None:
    """Check that saved values exist and can be saved, and that forced ones are saved."""
    num_values, given = len(problem.value_bytes), _given(problem)
    for value in sorted(solution.saved):
        if not 0 <= value < num_values:
            raise ValueError(f"saved value {value} is outside 0..{num_values - 1}")
        if value in given and value not in problem.forced:
            raise ValueError(
                f"saved value {value} is given: no op makes it, so there is nothing to save"
            )
    missing = sorted(problem.forced - solution.saved)
    if missing:
        raise ValueError(f"forced value {missing[0]} is not saved")


def _check_recomputed(problem: Knapsack, solution: Solution) -> None:
    """Check that recomputed ops find their inputs, and that required values are available then."""
    num_ops, available = len(problem.ops), _given(problem) | solution.saved
    previous = -1
    for index in solution.recomputed:
        if not 0 <= index < num_ops:
            raise ValueError(f"recomputed op {index} is outside 0..{num_ops - 1}")
        if index <= previous:
            raise ValueError(
                f"recomputed op {index} stands after op {previous}: not in topological order"
            )
        previous = index
        op = problem.ops[index]
        if not op.recomputable:
            raise ValueError(f"op {index} is recomputed but is not recomputable")
        for value in op.inputs:
            if value not in available:
                raise ValueError(
                    f"recomputed op {index} reads value {value}, "
                    "neither saved, given nor recomputed"
                )
        available.update(op.outputs)
    missing = sorted(problem.required - available)
    if missing:
        raise ValueError(f"required value {missing[0]} is neither saved, given nor recomputed")


def verify_staged(
    problem: StagedProblem, solution: StagedSolution, *, budget_bytes: int | None = None
) -> None:
    """Check that a schedule computes the step at the stated cost.

    Args:
        problem: The problem.
        solution: A schedule for it.
        budget_bytes: When given, the peak must also be at most so many bytes.

    Raises:
        ValueError: The schedule is wrong. The text names the op or value and the rule it breaks.
    """
    if not solution.found:
        raise ValueError(f"status is {solution.status.name}: there is no schedule to verify")
    _check_order(problem, solution.steps)
    _check_border(problem, solution.steps)
    _check_time(solution, [problem.ops[index] for index in solution.steps])
    if not solution.bound_ms <= solution.time_ms:
        raise ValueError(
            f"bound_ms is {solution.bound_ms}, above the schedule's own {solution.time_ms} ms"
        )
    peak_bytes = _peak_bytes(problem, solution.steps)
    if peak_bytes != solution.peak_bytes:
        raise ValueError(
            f"peak_bytes is {solution.peak_bytes}, but the replay takes {peak_bytes} bytes"
        )
    if budget_bytes is not None and peak_bytes > budget_bytes:
        raise ValueError(
            f"the schedule takes {peak_bytes} bytes; the budget is {budget_bytes} bytes"
        )


def _check_order(problem: StagedProblem, steps: tuple[int, ...]) -> None:
    """Check that inputs are made before they are read, that needed ops run, and how often."""
    made = _given(problem)
    ran: set[int] = set()
    for position, index in enumerate(steps):
        if not 0 <= index < len(problem.ops):
            raise ValueError(f"step {position}: op {index} is outside 0..{len(problem.ops) - 1}")
        op = problem.ops[index]
        if index in ran and not op.recomputable:
            raise ValueError(
                f"step {position}: op {index} runs a second time but is not recomputable"
            )
        for value in op.inputs:
            if value not in made:
                raise ValueError(
                    f"step {position}: op {index} reads value {value} before it is made"
                )
        ran.add(index)
        made.update(op.outputs)
    for index, op in enumerate(problem.ops):
        if op.needed and index not in ran:
            raise ValueError(f"op {index} is needed but never runs")
    missing = sorted(problem.held - made)
    if missing:
        raise ValueError(f"value {missing[0]} is held but never made")


def _check_border(problem: StagedProblem, steps: tuple[int, ...]) -> None:
    """Check that no barred value is read behind the border as it was made before it."""
    first_ops = set(range(problem.border))
    begun, last_first_run = set[int](), -1
    for step, index in enumerate(steps):
        if index in first_ops and index not in begun:
            begun.add(index)
            last_first_run = step
    before: set[int] = set()
    for step, index in enumerate(steps):
        op = problem.ops[index]
        if step > last_first_run:
            for value in before.intersection(op.inputs):
                raise ValueError(
                    f"step {step}: op {index} reads value {value}, which is barred from the border"
                )
            before.difference_update(op.outputs)
        else:
            before.update(problem.barred.intersection(op.outputs))


def _peak_bytes(problem: StagedProblem, steps: tuple[int, ...]) -> int:
    """The peak: the bytes of a value count in all steps of each of its live intervals."""
    # Bytes that become live at a step, less those that ended before it.
    change = [0] * (len(steps) + 1)

    def count(value: int, first: int, last: int) -> None:
        change[first] += problem.value_bytes[value]
        change[last + 1] -= problem.value_bytes[value]

    # Steps at which each value was last made and last read.
    intervals: dict[int, tuple[int, int]] = {}
    for step, index in enumerate(steps):
        op = problem.ops[index]
        for value in op.inputs:
            if value in intervals:
                intervals[value] = (intervals[value][0], step)
        for value in op.outputs:
            if value in intervals and value in problem.held:
                count(value, step, step)
                continue
            if value in intervals:
                count(value, *intervals[value])
            intervals[value] = (step, step)
    for value, (begun, last_read) in intervals.items():
        count(value, begun, len(steps) - 1 if value in problem.held else last_read)

    peak = live = 0
    for step, index in enumerate(steps):
        live += change[step]
        peak = max(peak, live + problem.ops[index].overhead_bytes)
    return peak


def _check_time(solution: Solution | StagedSolution, runs: Sequence[Op]) -> None:
    """Check that the stated time is that of the runs."""
    time_ms = fsum(op.time_ms for op in runs)
    if not isclose(time_ms, solution.time_ms, rel_tol=1e-12, abs_tol=0.0):
        raise ValueError(f"time_ms is {solution.time_ms}, but the ops take {time_ms} ms")
