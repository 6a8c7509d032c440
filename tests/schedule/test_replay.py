"""An independent replay of schedules, written from the definition of the peak, agrees with what
plans promise.

The definition: the largest sum of live storages and the running op's own overhead, over the
schedule. A storage lives from the run that makes it to the last run that reads it, before it is
made anew; what the user holds lives to the end; static storages never count; gradients of outputs
live through the backward; new values of buffers live to the end of the forward. A random op that
runs more than once has its generator's state (5,056 bytes on CPU) kept from its first run to its
last.
"""

from __future__ import annotations

import collections

import models
import numpy as np
import pytest
import torch
from helpers import planned
from made_of import mlp
from torch import nn

from rockmate import Plan, Planner
from rockmate.capture.roles import RoleKind

STATE_BYTES = 5056


def replayed_live_bytes(plan: Plan, overhead_of: list[int]) -> np.ndarray:
    """Bytes in use while each run is on, from the interval that each made storage lives."""
    graph, schedule = plan.graph, plan.schedule
    steps = [graph.ops[index] for index in schedule.forward + schedule.backward]
    num_forward, end = len(schedule.forward), len(schedule.forward) + len(schedule.backward)
    held = {graph.storage_of[n] for n, role in graph.outputs if role.kind is RoleKind.OUTPUT}
    returned = {
        graph.storage_of[n] for n, role in graph.outputs if role.kind is RoleKind.INPUT_GRADIENT
    }
    copied = {
        graph.storage_of[n]
        for n, role in graph.outputs
        if role.kind in (RoleKind.BUFFER_UPDATE, RoleKind.INPUT_UPDATE)
    }
    tangents = {graph.storage_of[n] for n, role in graph.inputs if role.kind is RoleKind.TANGENT}
    live = np.zeros(end, dtype=np.int64)
    births = collections.defaultdict(list)
    for position, op in enumerate(steps):
        for storage in op.writes:
            births[storage].append(position)
    intervals: dict[tuple[object, int], int] = {}
    for storage, made in births.items():
        for number, birth in enumerate(made):
            past = made[number + 1] if number + 1 < len(made) else end
            reads = [
                position for position in range(birth, past) if storage in steps[position].reads
            ]
            death = max([birth, *reads])
            if storage in copied and birth < num_forward:
                death = max(death, num_forward - 1)
            if storage in held or storage in returned:
                assert number == 0, "what the user holds is not made twice"
                death = end - 1
            live[birth : death + 1] += storage.num_bytes
            intervals[storage, birth] = death
    for storage in tangents:
        live[num_forward:] += storage.num_bytes
    runs = collections.defaultdict(list)
    for position, op in enumerate(steps):
        live[position] += overhead_of[op.index]
        runs[op].append(position)
    for op, positions in runs.items():
        if op.is_random and len(positions) > 1:
            live[positions[0] : positions[-1] + 1] += STATE_BYTES
        elif "batch_norm" in str(op.node.target) and len(positions) > 1:
            # mean and inverse deviation of each channel, float32
            live[positions[0] : positions[-1] + 1] += 2 * 4 * op.node.meta["val"][0].shape[1]
        elif "max_pool2d" in str(op.node.target) and len(positions) > 1:
            # two bytes for each maximum
            live[positions[0] : positions[-1] + 1] += 2 * op.node.meta["val"][0].numel()
    for position in schedule.in_place:
        op = steps[position]
        dying = [
            s
            for s in op.reads
            if any(b <= position == d for (t, b), d in intervals.items() if t is s)
        ]
        assert any(storage.num_bytes == op.writes[0].num_bytes for storage in dying), (
            "nothing dies that could be taken over"
        )
        live[position] -= op.writes[0].num_bytes
    return live


@pytest.mark.parametrize("name", models.TINY)
def test_independent_replay_agrees(name: str) -> None:
    planner = planned(name).planner
    low, high = planner.minimum_peak_bytes, planner.baseline_peak_bytes
    costs = planner.plan(1.0).costs
    overhead = [cost.overhead_bytes for cost in costs.first]
    is_same = [cost.overhead_bytes for cost in costs.recompute] == overhead
    assert is_same or name in ("resnet50", "hf-resnet")
    for share in (0.0, 0.1, 0.3, 0.6, 1.0):
        plan = planner.plan(int(low + share * (high - low)))
        live = replayed_live_bytes(plan, overhead)
        assert live.max() == plan.predicted_peak_bytes


def test_a_statistic_that_the_last_run_of_the_forward_updates_is_released_once() -> None:
    model = nn.Sequential(*mlp(16, 32, nn.BatchNorm1d(32)), nn.BatchNorm1d(16)).train()
    plan = Planner(model, torch.randn(32, 16)).plan(1.0)
    live = replayed_live_bytes(plan, [cost.overhead_bytes for cost in plan.costs.first])
    assert tuple(live.tolist()) == plan.simulation.live_bytes


def test_predicted_time_is_the_sum_over_the_runs() -> None:
    planner = planned("gpt2").planner
    costs = planner.plan(1.0).costs
    for share in (0.0, 0.5, 1.0):
        least = planner.minimum_peak_bytes
        plan = planner.plan(int(least + share * (planner.baseline_peak_bytes - least)))
        seen: set[int] = set()
        total = 0.0
        for index in plan.schedule.forward + plan.schedule.backward:
            total += (costs.recompute if index in seen else costs.first)[index].time_ms
            seen.add(index)
        assert total == pytest.approx(plan.predicted_ms, rel=1e-9)


@pytest.mark.parametrize("name", models.TINY)
def test_every_op_of_the_backward_runs_once_and_random_ops_draw_in_eagers_order(name: str) -> None:
    planner = planned(name).planner
    plan = planner.plan(planner.minimum_peak_bytes)
    ops = plan.graph.ops
    count = collections.Counter(plan.schedule.steps)
    assert all(
        count[op.index] == 1 for op in ops if op.phase.value == "backward" and op.final_gradients
    )
    assert all(ops[index].phase.value == "forward" for index in plan.schedule.forward)
    first_draws = [index for index in dict.fromkeys(plan.schedule.steps) if ops[index].is_random]
    assert first_draws == sorted(first_draws)
    assert all(index in set(plan.schedule.forward) for index in first_draws)
