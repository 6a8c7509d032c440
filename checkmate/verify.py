"""An independent check of a plan, by replaying it; it shares no code with the solvers.

The replay goes over the recomputed ops in order, with the set of available values, and adds up
bytes and times itself. It proves that a plan is *valid* and its costs true, not that it is optimal.
"""

from math import fsum, isclose

from checkmate.problem import Knapsack, Solution, Status


def verify(problem: Knapsack, solution: Solution, *, max_saved_bytes: int | None = None) -> None:
    """Check that a plan makes every required value available at the stated cost.

    Args:
        problem: The problem.
        solution: A plan for it.
        max_saved_bytes: When given, the plan must also save at most so many bytes.

    Raises:
        ValueError: The plan is wrong. The text names the op or value and the rule it breaks.
    """
    if solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
        raise ValueError(f"status is {solution.status.name}: there is no plan to verify")
    _check_saved(problem, solution)
    _check_recomputed(problem, solution)
    saved_bytes = sum(problem.value_bytes[value] for value in solution.saved - problem.forced)
    if saved_bytes != solution.saved_bytes:
        raise ValueError(
            f"saved_bytes is {solution.saved_bytes}, but the saved values have {saved_bytes} bytes"
        )
    time_ms = fsum(problem.ops[index].time_ms for index in solution.recomputed)
    if not isclose(time_ms, solution.time_ms, rel_tol=1e-12, abs_tol=0.0):
        raise ValueError(f"time_ms is {solution.time_ms}, but the recomputed ops take {time_ms} ms")
    if max_saved_bytes is not None and saved_bytes > max_saved_bytes:
        raise ValueError(
            f"the plan saves {saved_bytes} bytes; the limit is {max_saved_bytes} bytes"
        )


def _given(problem: Knapsack) -> set[int]:
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
