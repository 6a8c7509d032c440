"""The certificate's bound holds for every schedule that can be thought of, and it is not empty.

A bound that is wrong is found out.

Schedules come from a search of its own, which knows the graph and nothing of knapsacks: every set
of saved values of a small model, and random ones with values forgotten and made again at any time,
in the forward too, and the backward in any order.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from math import inf

import models
import pytest
from small_graphs import (
    HEURISTIC,
    NAMES,
    SMALL,
    budgets_between,
    candidates,
    fixed,
    graph_and_costs,
    small,
)

import rockmate.bound.lower_bound
import rockmate.planning.checked_forms
from checkmate import Curve
from rockmate import Planner
from rockmate.bound.knapsack import knapsack_of
from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.program_point import ProgramPoint, ProgramPoints
from rockmate.graph.blocks import partition
from rockmate.graph.ir import Op, Phase
from rockmate.planning.starts import KnapsackFamily
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate

ROUNDING = 1 - 1e-9  # of a sum of times: the order of addition, and ticks of 1e-12 of the total


@functools.cache
def reached(name: str) -> tuple[tuple[int, float], ...]:
    """Peak and time of the schedules that no other one beats in both, growing peaks."""
    graph, costs = small(name)
    figures = {
        (s.peak_bytes, s.time_ms)
        for s in (simulate(graph, schedule, costs) for schedule in candidates(name))
    }
    best: list[tuple[int, float]] = []
    for peak_bytes, time_ms in sorted(figures):
        if not best or time_ms < best[-1][1]:
            best.append((peak_bytes, time_ms))
    return tuple(best)


def certificate(name: str) -> LowerBound:
    graph, costs = small(name)
    least_ms = simulate(graph, baseline_schedule(graph), costs).time_ms
    return LowerBound(graph, costs, least_ms)


# --- no schedule beats the bound ------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_no_schedule_of_a_wide_search_beats_the_bound(name: str) -> None:
    bounds = certificate(name)
    assert len(reached(name)) >= 3
    for peak_bytes, time_ms in reached(name):
        assert time_ms >= bounds.bound_ms(peak_bytes) * ROUNDING, (
            f"{time_ms} ms within {peak_bytes:,} bytes"
        )


@pytest.mark.parametrize("name", SMALL)
def test_the_bound_is_the_largest_that_any_point_alone_gives(name: str) -> None:
    graph, costs = small(name)
    bounds, ops = certificate(name), [op for op in graph.ops if op.phase is not Phase.BACKWARD]
    bounds.__dict__["_forward_points"] = []  # they have a test of their own
    problems = [
        knapsack_of(ops, point.after, costs, available=point.live, with_states=True)[0]
        for point in bounds.points
    ]
    curves = [
        (point.min_bytes, Curve(problem))
        for point, problem in zip(bounds.points, problems, strict=True)
    ]
    least_ms = simulate(graph, baseline_schedule(graph), costs).time_ms
    for budget_bytes in budgets_between(0, reached(name)[-1][0], 40):
        again_ms = max(curve.bound_ms(budget_bytes - num_bytes) for num_bytes, curve in curves)
        assert bounds.bound_ms(budget_bytes) == least_ms + again_ms


def test_what_pooling_keeps_to_run_again_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wide search over the same model, above, holds that no more is."""
    with_states = certificate("pooling")
    known = [with_states.bound_ms(peak) for peak, _ in reached("pooling")]
    right = rockmate.bound.lower_bound.knapsack_of
    monkeypatch.setattr(
        rockmate.bound.lower_bound,
        "knapsack_of",
        lambda *args, **named: right(*args, **{**named, "with_states": False}),
    )
    without = certificate("pooling")
    lower = [without.bound_ms(peak) for peak, _ in reached("pooling")]
    assert all(one >= other * ROUNDING for one, other in zip(known, lower, strict=True))
    assert any(one > other * (1 + 1e-6) for one, other in zip(known, lower, strict=True))


@pytest.mark.parametrize("name", ["returning", "batch-norm"])
def test_the_bound_is_reached_at_some_peak_where_something_is_recomputed(name: str) -> None:
    bounds = certificate(name)
    *tighter, (_, least_ms) = reached(name)
    gaps = [time_ms - bounds.bound_ms(peak_bytes) for peak_bytes, time_ms in tighter]
    assert any(gap <= 1e-9 * least_ms for gap in gaps)
    assert bounds.bound_ms(tighter[0][0]) > least_ms


@pytest.mark.parametrize("name", SMALL)
def test_keeping_what_the_bound_keeps_takes_the_bounds_time_where_one_point_decides(
    name: str,
) -> None:
    """Such a schedule also runs late ops and serves reads before the point, so it is never
    faster."""
    graph, costs = small(name)
    found, chain = certificate(name), partition(graph)
    baseline = simulate(graph, baseline_schedule(graph), costs)
    one_level = KnapsackFamily(graph, chain, costs)
    num_reached = 0
    for budget_bytes in budgets_between(found.peak_bound_bytes, baseline.peak_bytes, 12):
        kept = found.saved_values_within(budget_bytes)
        assert (kept is None) == (found.bound_ms(budget_bytes) == inf)
        if kept is None:  # what ops keep to run again does not fit
            assert any(op.is_random or op.saved_state_bytes for op in graph.forward_ops)
            continue
        assert all(storage.producer.phase is Phase.FORWARD for storage in kept if storage.producer)
        simulation = simulate(graph, one_level.schedule_saving(kept), costs)
        bound_ms = found.bound_ms(budget_bytes)
        num_reached += simulation.time_ms <= bound_ms * (1 + 1e-9)
        assert simulation.peak_bytes > budget_bytes or simulation.time_ms >= bound_ms * (1 - 1e-9)
    assert num_reached > 0 or name not in ("chain", "returning", "dropout")
    assert found.saved_values_within(found.peak_bound_bytes - 1) is None


@pytest.mark.parametrize("name", SMALL)
def test_a_bound_that_counts_too_much_memory_is_found_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ProgramPoints.at
    more_bytes = reached(name)[-1][0] // 12

    def wrong(self: ProgramPoints, op: Op) -> ProgramPoint:
        point = right(self, op)
        return replace(point, min_bytes=point.min_bytes + more_bytes)

    monkeypatch.setattr(ProgramPoints, "at", wrong)
    bounds = certificate(name)
    assert any(
        time_ms < bounds.bound_ms(peak_bytes) * ROUNDING for peak_bytes, time_ms in reached(name)
    )


def test_a_bound_that_has_values_paid_for_which_are_held_anyway_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = ProgramPoints.at
    monkeypatch.setattr(
        ProgramPoints, "at", lambda self, op: replace(right(self, op), live=frozenset())
    )
    bounds = certificate("returning")
    assert any(
        time_ms < bounds.bound_ms(peak_bytes) * ROUNDING
        for peak_bytes, time_ms in reached("returning")
    )


def test_a_bound_that_takes_an_op_for_later_than_it_must_be_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = ProgramPoints.at

    def wrong(self: ProgramPoints, op: Op) -> ProgramPoint:
        point = right(self, op)
        return replace(
            point, after=tuple(other for other in self.graph.backward_ops if other is not op)
        )

    monkeypatch.setattr(ProgramPoints, "at", wrong)
    beaten = []
    for name in SMALL:
        bounds = certificate(name)
        beaten += [
            time_ms < bounds.bound_ms(peak_bytes) * ROUNDING
            for peak_bytes, time_ms in reached(name)
        ]
    assert any(beaten)


@pytest.mark.parametrize("name", SMALL)
def test_what_a_point_holds_is_held_in_every_schedule(name: str) -> None:
    graph, costs = small(name)
    points = certificate(name).points
    assert points
    for schedule in candidates(name, 150):
        live_bytes = simulate(graph, schedule, costs).live_bytes
        for point in points:
            position = schedule.steps.index(point.op.index)
            assert live_bytes[position] >= point.min_bytes, f"{point.op} at {position}"
            assert set(schedule.steps[: position + 1]).isdisjoint(op.index for op in point.after)


@pytest.mark.parametrize("name", SMALL)
def test_the_bound_falls_with_the_budget_to_the_time_of_no_recomputation(name: str) -> None:
    graph, costs = small(name)
    bounds = certificate(name)
    baseline = simulate(graph, baseline_schedule(graph), costs)
    values = [bounds.bound_ms(budget) for budget in budgets_between(0, baseline.peak_bytes, 120)]
    assert values == sorted(values, reverse=True)
    assert values[0] == inf
    assert values[-1] == baseline.time_ms == bounds.bound_ms(1 << 50)
    assert len(set(values)) >= 4
    most_needed = max(point.min_bytes for point in bounds.points)
    assert bounds.bound_ms(most_needed - 1) == inf


# --- plans against it -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_budgets"), [*((name, 5) for name in NAMES), ("t5-small", 2)])
def test_no_plan_of_any_strategy_beats_the_bound(name: str, num_budgets: int) -> None:
    planner = fixed(name).planner
    graph, costs = graph_and_costs(planner)
    for budget_bytes in budgets_between(
        planner.minimum_peak_bytes, planner.baseline_peak_bytes, num_budgets
    ):
        bound_ms = planner.lower_bound_ms(budget_bytes)
        for strategy in HEURISTIC:
            if budget_bytes < planner.minimum_peak(strategy):
                continue
            plan = planner.plan(budget_bytes, strategy=strategy)
            assert simulate(graph, plan.schedule, costs).time_ms == plan.predicted_ms
            assert plan.predicted_ms >= bound_ms * ROUNDING
            assert plan.lower_bound_ms == bound_ms >= planner.baseline_ms
            assert plan.optimality_gap == (plan.predicted_ms - bound_ms) / planner.baseline_ms
            # A plan may stay below its budget: then it must stand the bound of what it uses.
            assert plan.predicted_ms >= planner.lower_bound_ms(plan.predicted_peak_bytes) * ROUNDING
    assert planner.lower_bound_ms(1.0) == planner.baseline_ms
    # The same ops in another order: the sum may round otherwise.
    assert planner.plan(1.0).optimality_gap == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_is_infinite_only_where_no_strategy_has_a_plan(name: str) -> None:
    planner = fixed(name).planner
    budgets = budgets_between(1, planner.baseline_peak_bytes, 25)
    bounds = [planner.lower_bound_ms(budget_bytes) for budget_bytes in budgets]
    num_below = sum(budget_bytes < planner.minimum_peak_bytes for budget_bytes in budgets)
    for part in (bounds[:num_below], bounds[num_below:]):  # below, schedules in chunks count, too
        assert part == sorted(part, reverse=True)
    floor = min(planner.minimum_peak(strategy) for strategy in HEURISTIC)
    assert all(
        budget_bytes < floor
        for budget_bytes, bound_ms in zip(budgets, bounds, strict=True)
        if bound_ms == inf
    )
    assert bounds[0] == inf


def test_measured_costs_are_held_against_the_bound_too() -> None:
    workload = models.tiny("mlp")
    planner = Planner(workload.model, workload.sample)
    for point in planner.frontier():
        assert point.predicted_ms >= planner.lower_bound_ms(point.predicted_peak_bytes) * ROUNDING
    assert planner.lower_bound_ms(planner.minimum_peak_bytes) > planner.baseline_ms


def test_below_every_schedule_the_bound_is_infinite_or_above_the_baseline() -> None:
    planner = fixed("mlp").planner
    assert planner.lower_bound_ms(1) == inf
    plan = planner.plan(planner.minimum_peak_bytes)
    assert planner.baseline_ms < plan.lower_bound_ms < inf
    assert f"{plan.lower_bound_ms:.1f} ms within the budget" in plan.summary()
