"""No schedule with moves is faster than the bound: random ones, planned ones, and by exhaustion."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import moves
import pytest
import torch
from random_networks import RandomNetwork

from rockmate import InfeasibleBudgetError, Planner
from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.moved import MovedBound
from rockmate.costs.cost import Link
from rockmate.schedule.offload_request import OffloadRequest
from rockmate.schedule.schedule import with_moves
from rockmate.schedule.simulate import simulate

LINKS = (
    Link(out_gb_per_s=2.0, in_gb_per_s=1.0, latency_ms=0.0),
    Link(out_gb_per_s=0.2, in_gb_per_s=0.3, latency_ms=0.0),
)


@pytest.mark.parametrize("link", LINKS, ids=["quick", "slow"])
@pytest.mark.parametrize("seed", range(3))
def test_no_random_schedule_with_moves_beats_the_bound(seed: int, link: Link) -> None:
    torch.manual_seed(seed)
    model, x = RandomNetwork(seed), torch.randn(2, 8, 16, 16)
    planner = Planner(model, x, machine="cpu-avx2", numerics="bitwise")
    draw = random.Random(seed)
    for budget in (planner.minimum_peak_bytes, 0.6, 1.0):
        try:
            plan = planner.plan(budget)
        except InfeasibleBudgetError:
            continue
        costs = replace(plan.costs, link=link)
        unmoved = LowerBound(plan.graph, costs, planner.baseline_ms)
        bound = MovedBound(unmoved, OffloadRequest("disk"))
        for share in (0.2, 0.7, 1.0):
            found = moves.random_moves(plan.graph, plan.schedule, draw, share)
            schedule = with_moves(plan.graph, plan.schedule, found)
            simulation = simulate(plan.graph, schedule, costs)
            least_ms = bound.bound_ms(simulation.peak_bytes)
            assert planner.baseline_ms <= least_ms <= simulation.time_ms * (1 + 1e-6)


@pytest.mark.parametrize("name", ["llama", "resnet50"])
def test_plans_are_near_the_bound_and_never_below(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves.use_fast_link(monkeypatch, replace(moves.FAST, out_gb_per_s=1.0, in_gb_per_s=1.0))
    planner = moves.medium_planner(name, tmp_path, numerics="bitwise")
    for share in (0.7, 0.4):
        try:
            plan = planner.plan(share)
        except InfeasibleBudgetError:
            continue
        assert plan.lower_bound_ms <= plan.predicted_ms * (1 + 1e-6)
    assert planner.lower_bound_ms(1) == float("inf")


def test_a_full_host_leaves_the_bound_without_moves(tmp_path: Path) -> None:
    model, x = moves.layers(), moves.X

    def bound_ms(**options: object) -> float:
        planner = Planner(model, x, machine="cpu-avx2", numerics="bitwise", **options)
        return planner.lower_bound_ms(0.5)

    disk = f"disk:{tmp_path}"
    free, full = bound_ms(offload=disk), bound_ms(offload=disk, host_budget=1)
    some = bound_ms(offload=disk, host_budget=400_000)
    assert free < some < full
    assert full <= bound_ms() * (1 + 1e-6)
