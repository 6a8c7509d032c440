"""The fastest plan within one limit on saved bytes, by any backend.

* `"sweep"`, the default: presolve (`reduction`), then the exact dynamic program (`frontier`). It
  takes about a millisecond for a block and some tens for a whole model. If the problem is too wide
  for it, which depends on the input alone, CBC takes over.
* `"cbc"`: the ILP (`model`) by the CBC that ships with PuLP; always available. It takes 20 to 80 ms
  for 12 to 80 ops.
* `"highs"`: the ILP by HiGHS in this process, if `highspy` is installed; about half of CBC's time.

All are exact, so time and saved bytes do not depend on the backend. Those of an ILP are exact to
about 1e-9 of the total time, the tolerance of solvers in floating point. The backend may decide
which of several plans of equal time *and* bytes is returned. The default never uses HiGHS, so its
installation changes nothing. With one thread and fixed seeds, the same input gives the same plan,
unless the time limit stops the solver.

An ILP is solved in two stages: first the least time, then the fewest bytes within that time.
"""

from dataclasses import replace
from time import monotonic

import pulp

from checkmate.backend import check_backend, run
from checkmate.frontier import (
    Front,
    OutOfTimeError,
    TooManyLabelsError,
    best_within,
    part_fronts,
    recomputed_ops,
)
from checkmate.hull import convex_hull, min_saved_bytes
from checkmate.model import Model, build
from checkmate.problem import Knapsack, Solution, Status, check_limit, check_time_limit, no_plan
from checkmate.reduction import Reduced, assemble, reduce, ticks_of
from checkmate.verify import verify

BACKENDS = ("sweep", "cbc", "highs")

_TIE_TOLERANCE = 1e-4
"""Slack on the least time in the second stage, in the model's units: 1e-10 of all ops' time."""


def solve(
    problem: Knapsack,
    max_saved_bytes: int,
    *,
    time_limit_s: float = 10.0,
    backend: str | None = None,
) -> Solution:
    """The fastest plan within a limit on saved bytes; the fewest saved bytes break ties.

    Args:
        problem: The values to save or recompute.
        max_saved_bytes: Limit on the saved bytes, forced values not counted.
        time_limit_s: Wall time after which the search stops, in seconds.
        backend: One of `BACKENDS`; None for the default.

    Returns:
        A verified plan, or a solution without a plan whose status says why. If the default backend
        runs out of time, it returns the best plan of the convex hull as `Status.FEASIBLE`. Its
        status is never `Status.NOT_FOUND`.

    Raises:
        ValueError: The limit is no whole number, the time limit is not positive, or the backend is
            unknown or not installed.
    """
    check_limit("max_saved_bytes", max_saved_bytes)
    check_search(time_limit_s, backend)
    deadline = monotonic() + time_limit_s
    if backend in (None, "sweep"):
        reduced = reduce(problem)
        try:
            fronts = part_fronts(reduced, deadline=deadline)
            return solve_by_fronts(problem, reduced, fronts, max_saved_bytes, deadline=deadline)
        except TooManyLabelsError:
            answer = solve_by_ilp(problem, max_saved_bytes, deadline=deadline, backend="cbc")
        except OutOfTimeError:
            answer = no_plan(Status.NOT_FOUND)
        if answer.status in (Status.FEASIBLE, Status.NOT_FOUND):
            answer = _improve_by_hull(problem, max_saved_bytes, answer)
        return answer
    return solve_by_ilp(problem, max_saved_bytes, deadline=deadline, backend=backend)


def check_search(time_limit_s: float, backend: str | None) -> None:
    """Check a time limit and a backend.

    Raises:
        ValueError: The time limit is not positive, or the backend is unknown or not installed.
    """
    check_time_limit(time_limit_s)
    if backend is not None:
        check_backend(backend, BACKENDS)


def solve_by_fronts(
    problem: Knapsack,
    reduced: Reduced,
    fronts: tuple[Front, ...],
    max_saved_bytes: int,
    *,
    deadline: float,
) -> Solution:
    """`solve` with known Pareto sets of the parts.

    Raises:
        TooManyLabelsError: Too wide for the sweep.
        OutOfTimeError: The deadline passed.
    """
    total = best_within(fronts, max_saved_bytes, deadline=deadline)
    if not len(total.saved_bytes):
        return no_plan(Status.INFEASIBLE)
    last = len(total.saved_bytes) - 1
    plan = assemble(problem, recomputed_ops(reduced, fronts, total, last), Status.OPTIMAL)
    verify(problem, plan, max_saved_bytes=max_saved_bytes)
    return plan


def solve_by_ilp(
    problem: Knapsack, max_saved_bytes: int, *, deadline: float, backend: str
) -> Solution:
    """`solve` by the ILP in two stages; minimum cuts decide whether any plan exists."""
    if max_saved_bytes < min_saved_bytes(problem):
        return no_plan(Status.INFEASIBLE)
    model = build(problem, max_saved_bytes)
    fastest = _run_within(problem, model, max_saved_bytes, deadline, backend)
    if not fastest.found:
        # There is a plan. A solver that denies it is wrong by its rounding.
        return no_plan(Status.NOT_FOUND)
    if fastest.status is Status.FEASIBLE:
        verify(problem, fastest, max_saved_bytes=max_saved_bytes)
        return fastest
    ticks = ticks_of(problem)
    least_ticks = sum(ticks[index] for index in fastest.recomputed)
    bound = sum(model.time.get(model.recompute[index], 0.0) for index in fastest.recomputed)
    model.program.addConstraint(model.time <= bound + _TIE_TOLERANCE, "least_time")
    model.program.setObjective(model.saved)
    fewest = _run_within(problem, model, max_saved_bytes, deadline, backend)
    best = fastest
    if fewest.found and sum(ticks[i] for i in fewest.recomputed) <= least_ticks:
        best = min(fewest, fastest, key=lambda plan: plan.saved_bytes)
    best = replace(
        best, status=Status.OPTIMAL if fewest.status is Status.OPTIMAL else Status.FEASIBLE
    )
    verify(problem, best, max_saved_bytes=max_saved_bytes)
    return best


def _run_within(
    problem: Knapsack, model: Model, max_saved_bytes: int, deadline: float, backend: str
) -> Solution:
    """Run the solver until its rounded plan is exactly within the limit.

    A solver's tolerance may let a plan exceed the limit by a few bytes. Such a plan is cut off by a
    constraint that not all of its saved values are saved, and the solver runs once more. The result
    is exact, whatever the tolerance.
    """
    while True:
        status = run(model.program, deadline - monotonic(), backend).status
        if status in (Status.INFEASIBLE, Status.NOT_FOUND):
            return no_plan(status)
        recomputed = [
            index for index, variable in model.recompute.items() if round(variable.value() or 0)
        ]
        plan = assemble(problem, recomputed, status)
        if plan.saved_bytes <= max_saved_bytes:
            return plan
        heavy = (
            value
            for value in sorted(plan.saved)
            if value in model.save and problem.value_bytes[value]
        )
        cover = [model.save[value] for value in heavy]
        model.program.addConstraint(pulp.lpSum(cover) <= len(cover) - 1)


def _improve_by_hull(problem: Knapsack, max_saved_bytes: int, answer: Solution) -> Solution:
    """The better of an unproved answer and the convex hull, which tells whether a plan exists."""
    within = [plan for plan in convex_hull(problem) if plan.saved_bytes <= max_saved_bytes]
    if not within:
        return no_plan(Status.INFEASIBLE)
    best = min([answer, *within], key=lambda plan: (plan.time_ms, plan.saved_bytes))
    return replace(best, status=Status.FEASIBLE)
