"""The fastest staged schedule within one budget.

If the schedule without recomputation fits, it is the answer. Otherwise HiGHS (`backend`) solves
the program of `staged_model`, and its answer is replayed. The same input gives the same answer,
unless the time limit stops the solver.
"""

from time import monotonic

from checkmate.problem import Status
from checkmate.staged import (
    StagedProblem,
    StagedSolution,
    in_use_bytes,
    live_values,
    time_of,
    without_dead_runs,
)
from checkmate.staged_model import StagedModel

_BOUND_TOLERANCE = 1e-9
"""Share of all first runs' time by which the dual bound is lowered: solvers use floating point."""


def solve_staged(
    problem: StagedProblem,
    budget_bytes: int,
    *,
    time_limit_s: float = 60.0,
    first_recompute_op: int = 0,
) -> StagedSolution:
    """The fastest staged schedule whose peak is within a budget.

    Args:
        problem: The step.
        budget_bytes: Bound on the peak.
        time_limit_s: Wall time after which the search stops, in seconds.
        first_recompute_op: Nothing is recomputed in the stages of ops before this one. 0 is no
            restriction. The first op of the backward restricts recomputation to the backward, which
            takes far fewer variables. The answer is then proven among such schedules alone.

    Returns:
        A schedule with its proven bound, or an answer without one whose status says why.
    """
    deadline = monotonic() + time_limit_s
    once = tuple(range(len(problem.ops)))
    if max(in_use_bytes(problem, once), default=0) <= budget_bytes:
        return _answer(problem, once, Status.OPTIMAL, problem.min_time_ms)
    model = StagedModel(problem, budget_bytes, first_recompute_op=first_recompute_op)
    if model.is_infeasible:
        return StagedSolution(status=Status.INFEASIBLE)
    least_ms = problem.min_time_ms
    while True:
        outcome = model.program.solve(deadline - monotonic())
        proved_ms = least_ms + outcome.bound * model.ms_per_unit
        bound_ms = max(least_ms, proved_ms - _BOUND_TOLERANCE * least_ms)
        if outcome.status in (Status.INFEASIBLE, Status.NOT_FOUND):
            return StagedSolution(status=outcome.status, bound_ms=bound_ms)
        steps = without_dead_runs(problem, model.steps(outcome))
        used = in_use_bytes(problem, steps)
        if max(used) <= budget_bytes:
            return _answer(problem, steps, outcome.status, bound_ms)
        # The solver's tolerance let it exceed the budget by a few bytes: what is live at the peak
        # is forbidden, so that the result is exact. The stage is the number of ops that have run.
        position = used.index(max(used))
        stage = len(set(steps[:position]))
        model.forbid(stage, steps[position], sorted(live_values(problem, steps)[position]))


def _answer(
    problem: StagedProblem, steps: tuple[int, ...], status: Status, bound_ms: float
) -> StagedSolution:
    """A schedule with its time, peak and bound; a proven optimum is its own bound."""
    time_ms = time_of(problem, steps)
    return StagedSolution(
        status=status,
        steps=steps,
        time_ms=time_ms,
        peak_bytes=max(in_use_bytes(problem, steps), default=0),
        bound_ms=time_ms if status is Status.OPTIMAL else min(bound_ms, time_ms),
    )
