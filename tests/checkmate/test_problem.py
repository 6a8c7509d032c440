"""Known answers of `checkmate.Curve`."""

import doctest

import checkmate
from checkmate import Curve, Knapsack, Op, Solution


def test_a_chain_has_the_known_answer() -> None:
    ops = tuple(Op(time_ms=t, inputs=(i,), outputs=(i + 1,)) for i, t in enumerate((5.0, 1.0, 1.0)))
    problem = Knapsack(ops=ops, value_bytes=(9, 4, 4, 4), required=frozenset({1, 2, 3}))
    assert Curve(problem).plan(4) == Solution(
        saved=frozenset({1}), recomputed=(1, 2), time_ms=2.0, saved_bytes=4
    )


def test_a_plan_one_byte_above_the_limit_is_none() -> None:
    ops = tuple(Op(time_ms=t, inputs=(), outputs=(i,)) for i, t in enumerate((1.0, 2.0, 3.0)))
    problem = Knapsack(
        ops=ops, value_bytes=(700_000_001, 650_000_003, 600_000_007), required=frozenset({0, 1, 2})
    )
    curve = Curve(problem)
    plans = [curve.plan(limit) for limit in (1_950_000_010, 1_950_000_011)]
    assert [plan and plan.recomputed for plan in plans] == [(0,), ()]


def test_the_example_runs() -> None:
    assert doctest.testmod(checkmate).failed == 0
    assert doctest.testmod(checkmate).attempted > 5
