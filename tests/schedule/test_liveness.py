"""Every form of liveness says the same: tables, simulator, parts, residency; and a naive replay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

import numpy as np
import pytest
from helpers import REGIMES, budget_for, planned

from rockmate import Plan
from rockmate.graph.ir import Storage
from rockmate.plan.residency import Residency
from rockmate.schedule.liveness import OpDefUse, op_def_use
from rockmate.schedule.simulate import simulate_part

NAMES = ("gpt2", "hf-resnet", "mlp")
CASES = [(name, regime) for name in NAMES for regime in REGIMES]


def plan_of(name: str, regime: str) -> Plan:
    planner = planned(name).planner
    return planner.plan(budget_for(planner, regime))


def live_before_each_run(plan: Plan) -> list[set[Storage]]:
    """The definition itself: live is what a later run reads before its op runs once more."""
    graph, steps = plan.graph, plan.schedule.steps
    num_forward = len(plan.schedule.forward)
    wanted = {storage for storage in graph.storages if storage.is_result}
    live: list[set[Storage]] = []
    for position in range(len(steps) - 1, -1, -1):
        op = graph.ops[steps[position]]
        if position == num_forward - 1:
            wanted |= {*graph.updates}
        wanted -= {*op.writes}
        wanted |= {storage for storage in op.reads if not storage.is_static}
        live.append({*wanted})
    tangents = {storage for storage in graph.storages if storage.is_tangent}
    made: set[Storage] = set()
    for position, storages in enumerate(reversed(live)):
        storages &= made
        storages -= tangents
        if position >= num_forward:
            storages |= tangents
        made |= {*graph.ops[steps[position]].writes, *graph.ops[steps[position]].reads}
    return live[::-1]


def states_at_each_run(plan: Plan) -> list[int]:
    """Bytes of the states of recomputed ops, each live from the op's first run to its last."""
    steps = plan.schedule.steps
    total = [0] * len(steps)
    for index in set(steps):
        runs = [position for position, other in enumerate(steps) if other == index]
        if len(runs) > 1:
            for position in range(runs[0], runs[-1] + 1):
                total[position] += plan.graph.ops[index].recompute_state_bytes
    return total


@pytest.mark.parametrize(("name", "regime"), CASES)
def test_the_simulator_counts_what_a_naive_replay_counts(name: str, regime: str) -> None:
    plan = plan_of(name, regime)
    seen: set[int] = set()
    expected = []
    for position, (index, live, states) in enumerate(
        zip(plan.schedule.steps, live_before_each_run(plan), states_at_each_run(plan), strict=True)
    ):
        op = plan.graph.ops[index]
        cost = (plan.costs.recompute if index in seen else plan.costs.first)[index]
        seen.add(index)
        held = {storage for storage in live if storage not in op.writes}
        num_bytes = sum(storage.num_bytes for storage in held)
        if position not in plan.schedule.in_place:
            num_bytes += op.written_bytes
        expected.append(num_bytes + states + cost.overhead_bytes)
    assert list(plan.simulation.live_bytes) == expected


@pytest.mark.parametrize(("name", "regime"), CASES)
def test_a_snapshot_gives_the_tables_of_its_graph(name: str, regime: str) -> None:
    plan = plan_of(name, regime)
    of_graph = op_def_use(plan.graph)
    of_snapshot = Residency(plan.snapshot, plan.schedule)._def_use.ops
    for field in fields(OpDefUse):
        mine, theirs = getattr(of_graph, field.name), getattr(of_snapshot, field.name)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs


@pytest.mark.parametrize(("name", "regime"), CASES)
def test_intervals_are_those_of_the_naive_replay(name: str, regime: str) -> None:
    plan = plan_of(name, regime)
    residency = Residency(plan.snapshot, plan.schedule)
    for position, live in enumerate(live_before_each_run(plan)):
        running = plan.schedule.steps[position]
        found = {
            interval.storage
            for interval in residency.all()
            if interval.first <= position <= interval.last
        }
        expected = {storage.index for storage in live}
        assert found == expected | {s.index for s in plan.graph.ops[running].writes}


@pytest.mark.parametrize(("name", "regime"), CASES)
def test_a_half_by_itself_has_the_peak_that_it_has_in_the_schedule(name: str, regime: str) -> None:
    """`simulate_part` has a scan of its own; on whole halves it must agree with `simulate`."""
    plan = plan_of(name, regime)
    graph, schedule, costs = plan.graph, plan.schedule, plan.costs
    num_forward = len(schedule.forward)
    states = states_at_each_run(plan)
    live_bytes = [
        num_bytes - state
        for num_bytes, state in zip(plan.simulation.live_bytes, states, strict=True)
    ]
    at_turn: Collection[Storage] = live_before_each_run(plan)[num_forward]
    results = {storage for storage in graph.storages if storage.is_result}
    tangents = {storage for storage in graph.storages if storage.is_tangent}
    saved = {storage for storage in at_turn if storage not in tangents}
    forward = simulate_part(
        graph, schedule.forward, costs, before=(), after=saved | {*graph.updates}
    )
    assert forward.peak_bytes == max(live_bytes[:num_forward])
    backward = simulate_part(
        graph, schedule.backward, costs, before=at_turn, after=results | tangents, recompute=True
    )
    assert backward.peak_bytes == max(live_bytes[num_forward:])
    assert forward.time_ms + backward.time_ms == pytest.approx(plan.simulation.time_ms)
