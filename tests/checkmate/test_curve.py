"""`checkmate.Curve` against exhaustive search.

Exact where the sweep gets through, a lower bound where it does not.
"""

import sys
from itertools import pairwise
from math import inf, nextafter

import pulp
import pytest
from checkmate_cases import exhaustive, random_graph, transformer
from stopwatch import least_seconds

from checkmate import Curve, Knapsack, Op, Status, convex_hull, solve, verify
from checkmate.backend import run
from checkmate.reduction import assemble, ms_of_ticks, reduce

CURVE = sys.modules["checkmate.curve"]
FRONTIER = sys.modules["checkmate.frontier"]
TICK = 1e-12
"""Of the time of all ops: times are rounded to that, half of it an op.

See `checkmate.reduction`.
"""


def cases(number: int) -> list[Knapsack]:
    return [
        random_graph(seed, num_ops=3 + seed % 6, dense=seed % 2 == 0, coarse=seed % 3 != 0)
        for seed in range(number)
    ]


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

    Gives its distance from the optimum at each limit.
    """
    front = exhaustive(problem)
    gaps, last = [], inf
    for limit in limits_of(front):
        bound_ms, best_ms = curve.bound_ms(limit), least_ms(front, limit)
        assert (bound_ms == inf) == (best_ms == inf) == (curve.hull_plan_ms(limit) == inf), (
            f"at {limit}"
        )
        if best_ms < inf:
            assert 0 <= bound_ms <= best_ms + rounding(problem), (
                f"{bound_ms} at {limit}, where {best_ms} is reached"
            )
            assert max(best_ms - rounding(problem), bound_ms) <= curve.hull_plan_ms(limit) < inf
            gaps.append(best_ms - bound_ms)
        assert bound_ms <= last
        last = bound_ms
    return gaps


def test_equals_exhaustive_search_at_every_limit() -> None:
    for problem in cases(120):
        assert max(check_bound(problem, Curve(problem))) <= rounding(problem)


def test_the_plan_takes_the_time_that_exhaustive_search_finds() -> None:
    for problem in cases(60):
        curve, front = Curve(problem), exhaustive(problem)
        for limit in limits_of(front):
            plan, best_ms = curve.plan(limit), least_ms(front, limit)
            assert (plan is None) == (best_ms == inf), f"at {limit}"
            if plan is not None:
                verify(problem, plan, max_saved_bytes=limit)
                assert abs(plan.time_ms - best_ms) <= rounding(problem)
                assert plan.status is Status.OPTIMAL


@pytest.mark.parametrize("time_unit", [1e-9, 1 / 3, 1e9])
def test_times_of_any_size(time_unit: float) -> None:
    for seed in range(12):
        problem = random_graph(seed, num_ops=6, time_unit=time_unit)
        curve, total_ms = Curve(problem), sum(op.time_ms for op in problem.ops)
        for limit in limits_of(exhaustive(problem)):
            plan = solve(problem, limit)
            if plan.found:
                assert plan.time_ms - 1e-9 * total_ms <= curve.bound_ms(limit) <= plan.time_ms
            else:
                assert curve.bound_ms(limit) == inf


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


def test_a_part_that_is_too_wide_leaves_the_convex_hull(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FRONTIER, "_MAX_PART_LABELS", 1)
    gaps = [gap for problem in cases(60) for gap in check_bound(problem, Curve(problem))]
    assert max(gaps) > 0.01  # it is the hull that has answered
    assert min(abs(gap) for gap in gaps) < 1e-9  # which meets the optimum at its vertices


def test_a_coarse_hull_is_still_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FRONTIER, "_MAX_PART_LABELS", 1)
    monkeypatch.setattr(CURVE, "HULL_TOLERANCE", 0.3)
    for problem in cases(120):
        check_bound(problem, Curve(problem))


def test_too_many_sums_leave_the_convex_hull_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = cases(60)
    curves = [Curve(problem) for problem in problems]
    monkeypatch.setattr(FRONTIER, "_MAX_SUM_LABELS", 0)
    gaps = [
        gap
        for problem, curve in zip(problems, curves, strict=True)
        for gap in check_bound(problem, curve)
    ]
    assert max(gaps) > 0.01
    assert min(abs(gap) for gap in gaps) < 1e-9


def test_out_of_time_leaves_the_convex_hull() -> None:
    for problem in cases(30):
        check_bound(problem, Curve(problem, time_limit_s=1e-9))
    whole, hurried = Curve(transformer(2, seed=4)), Curve(transformer(2, seed=4), time_limit_s=1e-9)
    assert (whole.is_cut_short, hurried.is_cut_short) == (False, True)
    total = sum(transformer(2, seed=4).value_bytes)
    below = [
        hurried.bound_ms(limit) / whole.bound_ms(limit)
        for limit in range(0, total // 2, total // 40)
    ]
    assert max(below) <= 1 + 1e-9
    assert min(below) < 1 - 1e-3


def test_out_of_time_at_one_limit_leaves_the_convex_hull(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = transformer(2, seed=4)
    whole, curve, limit = Curve(problem), Curve(problem), sum(problem.value_bytes) // 5
    exact, best = whole.bound_ms(limit), whole.plan(limit)

    def late(*args: object, **kwargs: object) -> None:
        raise FRONTIER.OutOfTimeError

    monkeypatch.setattr(CURVE, "best_within", late)
    assert not curve.is_cut_short
    assert 0.9 * exact < curve.bound_ms(limit) < exact
    assert curve.is_cut_short
    plan = curve.plan(limit)
    assert plan is not None
    assert best is not None
    assert (plan.status, best.status) == (Status.FEASIBLE, Status.OPTIMAL)
    assert plan.saved_bytes <= limit
    assert (
        best.time_ms
        < plan.time_ms
        == min(one.time_ms for one in convex_hull(problem) if one.saved_bytes <= limit)
    )
    assert curve.plan(-1) is None


def least_ms_by_integers(problem: Knapsack, limit: int) -> float:
    """The least recompute time, as a 0/1 program that knows nothing of parts."""
    program = pulp.LpProblem("knapsack", pulp.LpMinimize)
    runs = [program.add_variable(f"R{i}", cat=pulp.LpBinary) for i in range(len(problem.ops))]
    maker = {value: index for index, op in enumerate(problem.ops) for value in op.outputs}
    saved = {value: program.add_variable(f"S{value}", cat=pulp.LpBinary) for value in maker}
    program.setObjective(
        pulp.lpSum(op.time_ms * run for op, run in zip(problem.ops, runs, strict=True))
    )
    wanted = [(value, 1) for value in problem.required]
    wanted += [(v, run) for op, run in zip(problem.ops, runs, strict=True) for v in op.inputs]
    for value, by in wanted:
        if value in maker:
            program += saved[value] + runs[maker[value]] >= by
    sizes = problem.value_bytes
    program += pulp.lpSum(sizes[value] / limit * each for value, each in saved.items()) <= 1
    run(program, 60.0)
    return sum(op.time_ms for op, each in zip(problem.ops, runs, strict=True) if each.value())


def test_whole_models_agree_with_a_program_of_integers() -> None:
    problem = transformer(1, seed=2)
    curve = Curve(problem)
    total = sum(problem.value_bytes[value] for value in problem.required)
    for limit in (total // 4, total // 2):
        assert curve.bound_ms(limit) == pytest.approx(
            least_ms_by_integers(problem, limit), rel=1e-9
        )


def test_nothing_to_save() -> None:
    curve = Curve(Knapsack(ops=(), value_bytes=(), required=frozenset()))
    assert curve.bound_ms(0) == curve.bound_ms(1 << 62) == 0
    assert curve.bound_ms(-1) == inf


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
    problem = transformer(24)
    curves: list[Curve] = []
    assert least_seconds(lambda: curves.append(Curve(problem))) < 5.0
    total = sum(problem.value_bytes[value] for value in problem.required)
    assert least_seconds(*[lambda: curves[0].bound_ms(total // 3)] * 2) < 2.0


def test_parts_put_together_have_the_pareto_set_of_all_the_parts() -> None:
    num_fewer = 0
    for problem in [*cases(40), transformer(2, seed=4)]:
        reduced = reduce(problem)
        fronts = FRONTIER.part_fronts(reduced, deadline=inf)
        fewer, together = FRONTIER.merge_fronts(reduced, fronts)
        num_fewer += len(fewer.parts) < len(reduced.parts)
        assert sorted(index for part in fewer.parts for index in part.indices) == sorted(
            i for part in reduced.parts for i in part.indices
        )
        apart, joined = (FRONTIER.sum_fronts(each, deadline=inf) for each in (fronts, together))
        assert (apart.saved_bytes.tolist(), apart.ticks.tolist()) == (
            joined.saved_bytes.tolist(),
            joined.ticks.tolist(),
        )
        for label in range(len(joined.ticks)):
            plan = assemble(
                problem, FRONTIER.recomputed_ops(fewer, together, joined, label), Status.OPTIMAL
            )
            assert plan.saved_bytes <= joined.saved_bytes[label]
            assert plan.time_ms <= ms_of_ticks(problem, [int(joined.ticks[label])])[0] + rounding(
                problem
            )
    assert num_fewer > 10
