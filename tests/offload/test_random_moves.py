"""Moves never change a value, and bytes follow from the order alone: random graphs and moves."""

from __future__ import annotations

import copy
import random

import moves
import pytest
import torch
from helpers import same_gradients
from random_networks import RandomNetwork
from schedules import verify
from torch import nn

from rockmate import InfeasibleBudgetError, Plan, Planner, RockmateModule
from rockmate.schedule.move import MoveEvent, placed_events, plan_slots


class Perceptron(nn.Module):
    """Layers with skips, whose values wait for long."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.skips = [draw.randrange(index + 1) for index in range(6)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for layer, skip in zip(self.layers, self.skips, strict=True):
            values.append(torch.nn.functional.gelu(layer(values[-1])) + values[skip])
        return values[-1].square().mean()


def cases(seed: int) -> tuple[nn.Module, torch.Tensor, list[Plan]]:
    torch.manual_seed(seed)
    if seed % 2:
        model, x = RandomNetwork(seed), torch.randn(2, 8, 16, 16)
    else:
        model, x = Perceptron(seed), torch.randn(64, 32)
    if not any(True for _ in model.parameters()):
        pytest.skip("this network has nothing to train")
    planner = Planner(model, x, machine="cpu-avx2", numerics="bitwise")
    plans = []
    for budget in (planner.minimum_peak_bytes, 0.7, 1.0):
        try:
            plans.append(planner.plan(budget))
        except InfeasibleBudgetError:
            continue
    return model, x, plans


@pytest.mark.parametrize("seed", range(6))
def test_a_move_never_changes_a_value(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moves.use_poison(monkeypatch)
    model, x, plans = cases(seed)
    draw = random.Random(seed)
    for plan in plans:
        plan = moves.moved(plan, draw)
        verify(plan.graph, plan.schedule)
        eager = copy.deepcopy(model)
        module = RockmateModule(model, x, plan=plan)
        same_gradients(module, eager, lambda callee: callee(x).backward())


@pytest.mark.parametrize("seed", range(6))
def test_the_peak_is_that_of_a_count_with_sets(seed: int) -> None:
    _, _, plans = cases(seed)
    draw = random.Random(seed)
    num_moves = 0
    for plan in plans:
        plan = moves.moved(plan, draw)
        num_moves += len(plan.schedule.moves)
        seen: set[int] = set()
        overhead = []
        for index in plan.schedule.steps:
            table = plan.costs.recompute if index in seen else plan.costs.first
            overhead.append(table[index].overhead_bytes)
            seen.add(index)
        counted = moves.live_bytes_of_walk(plan.graph, plan.schedule, overhead)
        has_states = any(op.recompute_state_bytes for op in plan.graph.ops)
        if not has_states and not plan.graph.updates:
            assert tuple(counted) == plan.simulation.live_bytes
            assert plan.simulation.peak_bytes == max(counted)
        # What a saved plan is checked against, from its snapshot.
        assert plan.residency.simulation(plan.costs) == plan.simulation
    assert num_moves


@pytest.mark.parametrize("seed", range(6))
def test_slots_that_are_taken_together_do_not_overlap(seed: int) -> None:
    _, _, plans = cases(seed)
    draw = random.Random(seed)
    for plan in plans:
        plan = moves.moved(plan, draw)
        sizes = [plan.graph.storages[move.storage].num_bytes for move in plan.schedule.moves]
        slots = plan_slots(plan.schedule.moves, sizes)
        taken: dict[int, range] = {}
        for placed in placed_events(plan.schedule.moves):
            if placed.event is MoveEvent.SEND:
                offset = slots.offsets[placed.index]
                own = range(offset, offset + sizes[placed.index])
                assert offset % 4096 == 0
                assert own.stop <= slots.num_bytes
                for other in taken.values():
                    assert own.stop <= other.start or other.stop <= own.start
                taken[placed.index] = own
            elif placed.event is MoveEvent.FETCHED:
                del taken[placed.index]
        assert slots.num_bytes == plan.simulation.host_bytes
