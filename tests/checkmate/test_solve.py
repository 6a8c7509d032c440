"""`checkmate.solve`, `verify` and the problem's own checks."""

import doctest
import re
import sys
from dataclasses import replace
from functools import partial
from math import nan
from typing import Any

import numpy as np
import pytest
from checkmate_cases import exhaustive, first_ops, random_graph, transformer
from stopwatch import least_seconds

import checkmate
from checkmate import Curve, Knapsack, Op, Solution, Status, pareto, solve, verify
from checkmate.reduction import reduce


def _cases(num_cases: int) -> list[Knapsack]:
    return [
        random_graph(seed, num_ops=3 + seed % 6, dense=seed % 2 == 0, coarse=seed % 3 != 0)
        for seed in range(num_cases)
    ]


def _check(problem: Knapsack, front: list[tuple[int, float]], limit: int) -> None:
    plan = solve(problem, limit)
    within = [cost for cost in front if cost[0] <= limit]
    if not within:
        assert plan.status is Status.INFEASIBLE
        assert not plan.found
        return
    assert plan.status is Status.OPTIMAL
    assert (plan.saved_bytes, round(plan.time_ms, 9)) == within[0]
    verify(problem, plan, max_saved_bytes=limit)


def test_equals_exhaustive_search_at_loose_binding_and_infeasible_limits() -> None:
    for problem in _cases(150):
        front = exhaustive(problem)
        least, most = front[-1][0], front[0][0]
        for limit in {most + 1, most - 1, (most + least) // 2, least, least - 1, -1}:
            _check(problem, front, limit)


def test_a_chain_has_the_known_answer() -> None:
    ops = tuple(Op(time_ms=t, inputs=(i,), outputs=(i + 1,)) for i, t in enumerate((5.0, 1.0, 1.0)))
    problem = Knapsack(ops=ops, value_bytes=(9, 4, 4, 4), required=frozenset({1, 2, 3}))
    assert solve(problem, 4) == Solution(
        status=Status.OPTIMAL, saved=frozenset({1}), recomputed=(1, 2), time_ms=2.0, saved_bytes=4
    )


def test_equal_times_save_the_fewest_bytes() -> None:
    """0.1 + 0.2 is not 0.3 in floating point, yet both plans take 0.3 ms.

    An op of no cost hides nothing.
    """
    ops = (
        Op(time_ms=0.1, inputs=(), outputs=(0,)),
        Op(time_ms=0.2, inputs=(), outputs=(1,)),
        Op(time_ms=0.3, inputs=(), outputs=(2,)),
        Op(time_ms=0.0, inputs=(), outputs=(3,)),
    )
    problem = Knapsack(ops=ops, value_bytes=(3, 3, 5, 7), required=frozenset({0, 1, 2, 3}))
    plan = solve(problem, 6)
    assert plan.saved == {2}
    assert plan.recomputed == (0, 1, 3)


def test_forced_values_are_saved_and_not_counted() -> None:
    op = Op(time_ms=1.0, inputs=(), outputs=(0,))
    problem = Knapsack(ops=(op,), value_bytes=(8,), required=frozenset({0}), forced=frozenset({0}))
    plan = solve(problem, 0)
    assert (plan.saved, plan.saved_bytes, plan.time_ms) == ({0}, 0, 0.0)


def test_nothing_to_do() -> None:
    empty = Knapsack(ops=(), value_bytes=(), required=frozenset())
    assert solve(empty, 0).status is Status.OPTIMAL
    assert solve(empty, -1).status is Status.INFEASIBLE


def test_the_same_input_gives_the_same_plan() -> None:
    problem = transformer(2, seed=5)
    limit = sum(problem.value_bytes[v] for v in problem.required) // 2
    assert solve(problem, limit) == solve(problem, limit)


def test_a_problem_too_wide_for_the_sweep_gets_the_best_plan_of_the_hull(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["checkmate.frontier"], "_MAX_PART_LABELS", 0)
    for problem in _cases(12):
        front = exhaustive(problem)
        limit = (front[0][0] + front[-1][0]) // 2
        plan = solve(problem, limit)
        assert plan.status is (Status.FEASIBLE if reduce(problem).parts else Status.OPTIMAL)
        assert (plan.saved_bytes, round(plan.time_ms, 9)) in front
        verify(problem, plan, max_saved_bytes=limit)


def test_out_of_time_is_said() -> None:
    problem = transformer(1)
    limit = sum(problem.value_bytes[v] for v in problem.required) // 2
    plan = solve(problem, limit, time_limit_s=1e-9)
    assert plan.status is Status.FEASIBLE
    verify(problem, plan, max_saved_bytes=limit)
    assert solve(problem, -1, time_limit_s=1e-9).status is Status.INFEASIBLE


def test_a_plan_one_byte_above_the_limit_is_none() -> None:
    ops = tuple(Op(time_ms=t, inputs=(), outputs=(i,)) for i, t in enumerate((1.0, 2.0, 3.0)))
    problem = Knapsack(
        ops=ops, value_bytes=(700_000_001, 650_000_003, 600_000_007), required=frozenset({0, 1, 2})
    )
    assert solve(problem, 1_950_000_010).recomputed == (0,)
    assert solve(problem, 1_950_000_011).recomputed == ()


def test_verify_names_what_is_wrong() -> None:
    ops = (
        Op(time_ms=1.0, inputs=(0,), outputs=(1,)),
        Op(time_ms=2.0, inputs=(1,), outputs=(2,)),
        Op(time_ms=4.0, inputs=(2,), outputs=(3,), recomputable=False),
    )
    problem = Knapsack(
        ops=ops, value_bytes=(8, 8, 8, 8), required=frozenset({2, 3}), forced=frozenset({3})
    )
    plan = solve(problem, 0)
    verify(problem, plan)
    wrong = {
        "forced value 3 is not saved": {"saved": frozenset()},
        "value 0 is given": {"saved": frozenset({0, 3})},
        "saved value 9 is outside": {"saved": frozenset({3, 9})},
        "recomputed op 9 is outside": {"recomputed": (0, 9)},
        "not in topological order": {"recomputed": (0, 0)},
        "not recomputable": {"recomputed": (0, 1, 2)},
        "op 1 reads value 1": {"recomputed": (1,)},
        "required value 2": {"recomputed": (0,)},
        "saved_bytes is 5": {"saved_bytes": 5},
        "time_ms is 2.5": {"time_ms": 2.5},
        "no plan to verify": {"status": Status.INFEASIBLE},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            verify(problem, replace(plan, **change))
    with pytest.raises(ValueError, match="the limit is -1 bytes"):
        verify(problem, plan, max_saved_bytes=-1)


@pytest.mark.parametrize(
    ("message", "ops", "sizes", "required"),
    [
        ("value 0 has -1 bytes", [], (-1,), ()),
        ("value 0 has 1.5 bytes", [], (1.5,), ()),
        ("required: value 3 is outside", [], (1,), (3,)),
        ("op 0 takes -1.0 ms", [(-1.0, (), (0,))], (1,), ()),
        ("op 0 takes nan ms", [(float("nan"), (), (0,))], (1,), ()),
        ("op 0 takes '1' ms; a finite time", [("1", (), (0,))], (1,), ()),
        ("op 0 takes None ms; a finite time", [(None, (), (0,))], (1,), ()),
        ("op 0 inputs: value 7", [(1.0, (7,), (0,))], (1,), ()),
        ("made by op 0 and by op 1", [(1.0, (), (0,)), (1.0, (), (0,))], (1,), ()),
        ("op 0 reads value 1, which op 1", [(1.0, (1,), (0,)), (1.0, (), (1,))], (1, 1), ()),
    ],
)
def test_a_bad_problem_is_refused(message: str, ops: list, sizes: tuple, required: tuple) -> None:
    with pytest.raises(ValueError, match=message):
        Knapsack(
            ops=tuple(Op(time_ms=t, inputs=i, outputs=o) for t, i, o in ops),
            value_bytes=sizes,
            required=frozenset(required),
        )


def test_a_bad_search_is_refused() -> None:
    problem = transformer(1)
    with pytest.raises(ValueError, match="time_limit_s is 0"):
        solve(problem, 1, time_limit_s=0)
    with pytest.raises(ValueError, match="time_limit_s is '9'"):
        pareto(problem, time_limit_s="9")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("limit", ["3", None, 3.5, nan, True])
def test_a_limit_that_is_no_whole_number_is_refused(limit: Any) -> None:
    problem = transformer(1)
    curve = Curve(problem)
    for ask in (
        partial(solve, problem),
        curve.plan,
        curve.bound_ms,
    ):
        with pytest.raises(
            ValueError, match=re.escape(f"max_saved_bytes is {limit!r}; a whole number (int)")
        ):
            ask(limit)


def test_a_limit_of_numpy_is_taken() -> None:
    problem, limit = transformer(1), np.int64(10**9)
    assert solve(problem, limit) == solve(problem, int(limit))  # pyright: ignore[reportArgumentType]


def test_the_example_runs() -> None:
    assert doctest.testmod(checkmate).failed == 0
    assert doctest.testmod(checkmate).attempted > 5


def test_a_block_is_solved_in_milliseconds() -> None:
    problem = first_ops(transformer(2, seed=1), 25)
    run = partial(solve, problem, 10_000_000)
    assert least_seconds(run, run, run) < 0.5
