"""`checkmate.Curve` against exhaustive search, and their speed."""

import sys
from itertools import pairwise
from math import inf, nextafter

import numpy as np
import pytest
from checkmate_cases import exhaustive, first_ops, random_graph, transformer, verify
from stopwatch import least_seconds

from checkmate import Curve, Knapsack, Op, Solution
from checkmate.backend import Program
from rockmate.planning.curve_choice import lower_hull

CURVE = sys.modules["checkmate.curve"]
TICK = 1e-12
"""Of the time of all ops: times are rounded to that, half of it an op.

See `checkmate.reduction`.
"""


def cases(number: int) -> list[Knapsack]:
    return [
        random_graph(seed, num_ops=3 + seed % 6, dense=seed % 2 == 0, coarse=seed % 3 != 0)
        for seed in range(number)
    ]


def costs_of(plans: tuple[Solution, ...]) -> list[tuple[int, float]]:
    return [(plan.saved_bytes, round(plan.time_ms, 9)) for plan in plans]


def vertices_of(front: list[tuple[int, float]]) -> set[tuple[int, float]]:
    exact = [(saved, round(time_ms * 10**9)) for saved, time_ms in front]
    return {front[i] for i in lower_hull(exact)}


def limits_of(front: list[tuple[int, float]]) -> list[int]:
    """Every limit at which the answer changes, one byte to either side, between, and the ends."""
    sizes = sorted(saved_bytes for saved_bytes, _ in front)
    between = [(one + other) // 2 for one, other in pairwise(sizes)]
    around = [size + step for size in sizes for step in (-1, 0, 1)]
    return sorted({-1, *around, *between, 2 * sizes[-1] + 7, 1 << 62})


def least_ms(front: list[tuple[int, float]], limit: int) -> float:
    return min((time_ms for saved_bytes, time_ms in front if saved_bytes <= limit), default=inf)


def rounding(problem: Knapsack) -> float:
    """What `exhaustive` rounds its sums to, and ticks."""
    return 1e-9 + TICK * (1 + len(problem.ops)) * sum(op.time_ms for op in problem.ops)


def check_bound(problem: Knapsack, curve: Curve) -> list[float]:
    """Asserts that the curve is a lower bound that falls.

    Gives its distance from the optimum at each vertex of the convex hull.
    """
    front, last = exhaustive(problem), inf
    for limit in limits_of(front):
        bound_ms, best_ms = curve.bound_ms(limit), least_ms(front, limit)
        assert (bound_ms == inf) == (best_ms == inf), f"at {limit}"
        if best_ms < inf:
            assert 0 <= bound_ms <= best_ms + rounding(problem), (
                f"{bound_ms} at {limit}, where {best_ms} is reached"
            )
        assert bound_ms <= last
        last = bound_ms
    return [time_ms - curve.bound_ms(size) for size, time_ms in vertices_of(front)]


def test_the_bound_meets_exhaustive_search_at_every_vertex() -> None:
    for problem in cases(120):
        gaps = check_bound(problem, Curve(problem))
        assert max(map(abs, gaps)) <= rounding(problem)


def test_a_coarse_hull_is_still_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CURVE, "_MAX_EXACT_OPS", 0)
    monkeypatch.setattr(CURVE, "_TOLERANCE", 0.3)
    assert max(max(check_bound(problem, Curve(problem))) for problem in cases(120)) > 0.01


@pytest.mark.parametrize("tolerance", [0.3, 0.6])
def test_a_coarse_hull_is_that_near_with_fewer_points(
    tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CURVE, "_MAX_EXACT_OPS", 0)
    monkeypatch.setattr(CURVE, "_TOLERANCE", tolerance)
    num_left_out = 0
    for problem in cases(200):
        front, plans = exhaustive(problem), Curve(problem).plans()
        for plan in plans:  # one that the hull leaves out may be better in both
            verify(problem, plan)
        assert {front[0], front[-1]} <= set(costs_of(plans))
        saved, times_ms = zip(*((one.saved_bytes, one.time_ms) for one in plans[::-1]), strict=True)
        tolerated_ms = tolerance * (front[-1][1] - front[0][1])
        for saved_bytes, time_ms in vertices_of(front):
            assert np.interp(saved_bytes, saved, times_ms) <= time_ms + tolerated_ms + 1e-9
            num_left_out += saved_bytes not in saved
    assert num_left_out > 0


def test_the_hull_holds_every_vertex_and_only_pareto_points() -> None:
    for problem in cases(200):
        front = exhaustive(problem)
        plans = Curve(problem).plans()
        assert vertices_of(front) <= set(costs_of(plans)) <= set(front)
        for plan in plans:
            verify(problem, plan)


def test_a_plan_is_the_fastest_of_the_hull_within_the_limit() -> None:
    for problem in cases(60):
        curve, hull = Curve(problem), Curve(problem).plans()
        for limit in limits_of(exhaustive(problem)):
            plan, within = curve.plan(limit), [one for one in hull if one.saved_bytes <= limit]
            assert (plan is None) == (not within), f"at {limit}"
            if plan is not None:
                verify(problem, plan)
                assert plan.saved_bytes <= limit
                assert plan.time_ms == pytest.approx(min(one.time_ms for one in within))


def test_few_points_hold_both_ends() -> None:
    for problem in cases(60):
        hull = costs_of(Curve(problem).plans())
        for max_points in (2, 3, 5, 8):
            costs = costs_of(Curve(problem).plans(max_points))
            assert {costs[0], costs[-1]} <= {hull[0], hull[-1]}
            assert len(costs) == min(max_points, len(hull))
            assert set(costs) <= set(hull)


def test_a_transformer_gets_well_spread_verified_points() -> None:
    problem = transformer(4, seed=2)
    plans = Curve(problem).plans(16)
    assert len(plans) == 16
    assert plans == Curve(problem).plans(16)
    assert plans[0].time_ms == 0
    for before, after in pairwise(plans):
        assert before.saved_bytes > after.saved_bytes
        assert before.time_ms < after.time_ms
        assert before.saved_bytes - after.saved_bytes < 0.2 * plans[0].saved_bytes
    for plan in plans:
        verify(problem, plan)


@pytest.mark.parametrize("time_unit", [1e-9, 1 / 3, 1e9])
def test_times_of_any_size(time_unit: float) -> None:
    for seed in range(12):
        problem = random_graph(seed, num_ops=6, time_unit=time_unit)
        curve, total_ms = Curve(problem), sum(op.time_ms for op in problem.ops)
        for saved_bytes, time_ms in vertices_of(exhaustive(problem)):
            assert time_ms - 1e-9 * total_ms <= curve.bound_ms(saved_bytes) + 1e-9
            assert curve.bound_ms(saved_bytes) <= time_ms + 1e-9


def test_rounding_never_lifts_the_bound_above_the_least_sum_of_times() -> None:
    """Times of which no sum is exact.

    A bound that is one rounding too high would call a plan impossible.
    """
    for count in range(1, 40):
        ops = tuple(Op(time_ms=1 / (3 + i), inputs=(), outputs=(i,)) for i in range(count))
        problem = Knapsack(ops=ops, value_bytes=(8,) * count, required=frozenset(range(count)))
        curve = Curve(problem)
        for kept in range(count + 1):
            slowest = sorted((op.time_ms for op in ops), reverse=True)
            assert curve.bound_ms(8 * kept + 3) <= sum(slowest[kept:])


def least_ms_by_relaxation(problem: Knapsack, limit: int) -> float:
    """The least recompute time, as a linear program that knows nothing of parts."""
    program = Program()
    runs = [program.variable(op.time_ms) for op in problem.ops]
    maker = {value: index for index, op in enumerate(problem.ops) for value in op.outputs}
    saved = {value: program.variable() for value in maker}
    for value in problem.required & maker.keys():
        program.at_most({saved[value]: -1, runs[maker[value]]: -1}, -1)
    for op, run in zip(problem.ops, runs, strict=True):
        for value in maker.keys() & set(op.inputs):
            program.at_most({run: 1, saved[value]: -1, runs[maker[value]]: -1}, 0)
    program.at_most({each: problem.value_bytes[v] / limit for v, each in saved.items()}, 1)
    return program.solve(60.0).bound


def test_whole_models_agree_with_a_linear_program() -> None:
    problem = transformer(1, seed=2)
    curve = Curve(problem)
    total = sum(problem.value_bytes[value] for value in problem.required)
    for limit in (total // 4, total // 2):
        assert curve.bound_ms(limit) == pytest.approx(
            least_ms_by_relaxation(problem, limit), rel=1e-6
        )


def test_nothing_to_save() -> None:
    curve = Curve(Knapsack(ops=(), value_bytes=(), required=frozenset()))
    assert curve.bound_ms(0) == curve.bound_ms(1 << 62) == 0
    assert curve.bound_ms(-1) == inf
    assert curve.plan(-1) is None


def test_what_cannot_run_again_sets_the_least_limit() -> None:
    op = Op(time_ms=1.0, inputs=(), outputs=(0,), recomputable=False)
    curve = Curve(Knapsack(ops=(op,), value_bytes=(8,), required=frozenset({0})))
    assert curve.bound_ms(7) == inf
    assert curve.bound_ms(8) == 0


def test_the_check_of_this_file_finds_a_bound_that_is_too_high(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Curve.bound_ms
    monkeypatch.setattr(
        Curve, "bound_ms", lambda self, limit: nextafter(right(self, limit - 1), inf)
    )
    for problem in cases(5):
        with pytest.raises(AssertionError):
            check_bound(problem, Curve(problem))


def test_a_deep_model_is_prepared_in_seconds_and_asked_in_milliseconds() -> None:
    problem = transformer(33, seed=7)
    curves: list[Curve] = []
    assert least_seconds(lambda: curves.append(Curve(problem))) < 5.0
    assert len(curves[0].points) > 100
    total = sum(problem.value_bytes[value] for value in problem.required)
    assert least_seconds(*[lambda: curves[0].bound_ms(total // 3)] * 2) < 0.01


@pytest.mark.parametrize(("num_ops", "seconds"), [(25, 0.5), (80, 2.0)])
def test_a_block_is_solved_fast(num_ops: int, seconds: float) -> None:
    problem = first_ops(transformer(5, seed=7), num_ops)

    def find() -> None:
        Curve(problem).plans(16)

    assert least_seconds(find, find, find) < seconds
