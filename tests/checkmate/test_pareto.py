"""`checkmate.curve` and `checkmate.convex_hull` against exhaustive search, and their speed."""

import sys
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from checkmate_cases import exhaustive, first_ops, random_graph, transformer
from stopwatch import least_seconds

from checkmate import Knapsack, Solution, Status, convex_hull, pareto, verify
from checkmate.frontier import hull_positions
from checkmate.hull import Hull


def _costs(plans: tuple[Solution, ...]) -> list[tuple[int, float]]:
    return [(plan.saved_bytes, round(plan.time_ms, 9)) for plan in plans]


def _cases(num_cases: int) -> list[Knapsack]:
    return [
        random_graph(seed, num_ops=3 + seed % 6, dense=seed % 2 == 0, coarse=seed % 3 != 0)
        for seed in range(1000, 1000 + num_cases)
    ]


def _vertices(front: list[tuple[int, float]]) -> set[tuple[int, float]]:
    exact = [(saved, round(time_ms * 10**9)) for saved, time_ms in front]
    return {front[i] for i in hull_positions(exact)}


def test_pareto_is_the_exhaustive_set() -> None:
    for problem in _cases(200):
        assert _costs(pareto(problem, max_points=1000)) == exhaustive(problem)


@pytest.mark.parametrize("name", ["_MAX_SUM_LABELS", "_MAX_PART_LABELS"])
def test_what_is_too_wide_gets_the_hull(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["checkmate.frontier"], name, 0)
    for problem in _cases(20):
        plans, front = pareto(problem, max_points=1000), exhaustive(problem)
        assert _vertices(front) <= set(_costs(plans)) <= set(front)
        assert {plan.status for plan in plans} == {Status.OPTIMAL}


def test_the_hull_holds_every_vertex_and_only_pareto_points() -> None:
    for problem in _cases(200):
        front = exhaustive(problem)
        plans = convex_hull(problem)
        assert _vertices(front) <= set(_costs(plans)) <= set(front)


@pytest.mark.parametrize("tolerance", [0.3, 0.6])
def test_a_tolerated_hull_is_that_near_with_fewer_points(tolerance: float) -> None:
    num_left_out = 0
    for problem in _cases(200):
        front, hull = exhaustive(problem), Hull(problem, tolerance=tolerance)
        plans = [hull.plan(position) for position in range(len(hull.points))]
        assert set(_costs(tuple(plans))) <= set(front)
        assert {front[0], front[-1]} <= set(_costs(tuple(plans)))
        saved, times_ms = zip(*((one.saved_bytes, one.time_ms) for one in plans[::-1]), strict=True)
        tolerated_ms = tolerance * (front[-1][1] - front[0][1])
        for saved_bytes, time_ms in _vertices(front):
            assert np.interp(saved_bytes, saved, times_ms) <= time_ms + tolerated_ms + 1e-9
            num_left_out += saved_bytes not in saved
    assert num_left_out > 0


def test_few_points_hold_both_ends_and_the_hull_as_far_as_it_fits() -> None:
    for problem in _cases(60):
        front = exhaustive(problem)
        vertices = _vertices(front)
        for max_points in (2, 3, 5, 8):
            costs = _costs(pareto(problem, max_points=max_points))
            assert len(costs) == min(max_points, len(front))
            assert {costs[0], costs[-1]} <= {front[0], front[-1]}
            assert set(costs) <= set(front)
            assert vertices <= set(costs) or set(costs) <= vertices


@pytest.mark.parametrize("num_layers", [1, 4])
def test_a_transformer_gets_well_spread_verified_points(num_layers: int) -> None:
    problem = transformer(num_layers, seed=2)
    plans = pareto(problem)
    assert len(plans) == 16
    assert plans == pareto(problem)
    assert plans[0].time_ms == 0
    for before, after in pairwise(plans):
        assert before.saved_bytes > after.saved_bytes
        assert before.time_ms < after.time_ms
        assert before.saved_bytes - after.saved_bytes < 0.2 * plans[0].saved_bytes
    for plan in (*plans, *convex_hull(problem)):
        assert plan.status is Status.OPTIMAL
        verify(problem, plan)


def test_out_of_time_still_gives_the_hull() -> None:
    problem = transformer(1)
    plans = pareto(problem, time_limit_s=1e-9)
    assert set(_costs(plans)) <= set(_costs(convex_hull(problem)))
    assert len(plans) > 2
    assert {plan.status for plan in plans} == {Status.FEASIBLE}


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="max_points is 1; the least is 2"):
        pareto(transformer(1), max_points=1)


@pytest.mark.parametrize(("num_ops", "seconds"), [(12, 1.0), (25, 2.0), (80, 6.0)])
def test_pareto_is_fast(num_ops: int, seconds: float) -> None:
    problem = first_ops(transformer(5, seed=7), num_ops)
    run = partial(pareto, problem)
    assert least_seconds(run, run, run) < seconds


def test_the_hull_of_a_whole_model_is_fast() -> None:
    problem = transformer(33, seed=7)
    run = partial(convex_hull, problem)
    assert least_seconds(run, run) < 10.0
    assert len(run()) > 100
