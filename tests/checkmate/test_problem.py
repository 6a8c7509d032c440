"""Known answers of `checkmate.Curve`, and the problem's own checks."""

import doctest
import re
from math import nan
from typing import Any

import numpy as np
import pytest
from checkmate_cases import transformer

import checkmate
from checkmate import Curve, Knapsack, Op, Solution


def test_a_chain_has_the_known_answer() -> None:
    ops = tuple(Op(time_ms=t, inputs=(i,), outputs=(i + 1,)) for i, t in enumerate((5.0, 1.0, 1.0)))
    problem = Knapsack(ops=ops, value_bytes=(9, 4, 4, 4), required=frozenset({1, 2, 3}))
    assert Curve(problem).plan(4) == Solution(
        saved=frozenset({1}), recomputed=(1, 2), time_ms=2.0, saved_bytes=4
    )


def test_forced_values_are_saved_and_not_counted() -> None:
    op = Op(time_ms=1.0, inputs=(), outputs=(0,))
    problem = Knapsack(ops=(op,), value_bytes=(8,), required=frozenset({0}), forced=frozenset({0}))
    assert Curve(problem).plan(0) == Solution(
        saved=frozenset({0}), recomputed=(), time_ms=0.0, saved_bytes=0
    )


def test_a_plan_one_byte_above_the_limit_is_none() -> None:
    ops = tuple(Op(time_ms=t, inputs=(), outputs=(i,)) for i, t in enumerate((1.0, 2.0, 3.0)))
    problem = Knapsack(
        ops=ops, value_bytes=(700_000_001, 650_000_003, 600_000_007), required=frozenset({0, 1, 2})
    )
    curve = Curve(problem)
    plans = [curve.plan(limit) for limit in (1_950_000_010, 1_950_000_011)]
    assert [plan and plan.recomputed for plan in plans] == [(0,), ()]


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


@pytest.mark.parametrize("limit", ["3", None, 3.5, nan, True])
def test_a_limit_that_is_no_whole_number_is_refused(limit: Any) -> None:
    curve = Curve(transformer(1))
    for ask in (curve.plan, curve.bound_ms):
        with pytest.raises(
            ValueError, match=re.escape(f"max_saved_bytes is {limit!r}; a whole number (int)")
        ):
            ask(limit)


def test_a_limit_of_numpy_is_taken() -> None:
    curve, limit = Curve(transformer(1)), np.int64(10**9)
    assert curve.plan(limit) == curve.plan(int(limit))  # pyright: ignore[reportArgumentType]


def test_the_example_runs() -> None:
    assert doctest.testmod(checkmate).failed == 0
    assert doctest.testmod(checkmate).attempted > 5
