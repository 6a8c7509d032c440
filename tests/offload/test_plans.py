"""Plans with moves: never slower, below the least peak of recomputation, the same from a file."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import models
import moves
import pytest
import torch
from helpers import same_gradients
from moves import X, layers, step

from bench.models import built, makers
from rockmate import InfeasibleBudgetError, Plan, PlanFileError, Planner, RockmateModule


def planner_of(folder: Path, **options: object) -> Planner:
    return Planner(layers(), X, machine="cpu-avx2", offload=f"disk:{folder}", **options)


@functools.cache
def half() -> Plan:
    """Of half of the peak, made once."""
    return planner_of(Path(tempfile.gettempdir()), host_budget="1GiB").plan(0.5)


def test_moves_reach_budgets_below_the_least_peak_of_recomputation(tmp_path: Path) -> None:
    workload = models.medium("vit-base")
    plain = Planner(workload.model, workload.sample, machine="cpu-avx2", numerics="bitwise")
    planner = moves.medium_planner("vit-base", tmp_path, numerics="bitwise")
    least = planner.minimum_peak_bytes
    assert least < 0.9 * plain.minimum_peak_bytes
    with pytest.raises(InfeasibleBudgetError):
        plain.plan(least)
    plan = planner.plan(least)
    assert plan.predicted_peak_bytes <= least
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner.plan(least // 2)
    assert planner.plan(caught.value.minimum_bytes).predicted_peak_bytes <= least


def test_the_host_budget_is_kept(tmp_path: Path) -> None:
    free = planner_of(tmp_path).plan(0.5)
    assert free.simulation.host_bytes > 400_000
    bounded = planner_of(tmp_path, host_budget=700_000).plan(0.5)
    assert 0 < bounded.simulation.host_bytes <= 700_000
    assert bounded.predicted_ms >= free.predicted_ms


def test_within_a_host_budget_no_plan_is_slower_than_layers_that_run_once_more() -> None:
    make = partial(makers("large")["llama-3-8b"], length=500_000, layers=6)
    workload = built("llama", make, device="meta", dtype=torch.bfloat16)
    options: dict[str, Any] = {"machine": "h100", "offload": "host", "outputs": "loss"}
    options |= {"weights": "all", "host_budget": "80GiB", "time_limit_s": 5}
    plan = Planner(workload.model, dict(workload.make_batch(0, 1)), **options).plan("59.5GiB")
    times = [plan.costs.first[op.index].time_ms for op in plan.graph.forward_ops]
    assert 0 < plan.simulation.host_bytes <= 80 << 30
    assert plan.predicted_ms <= plan.baseline_ms + sum(times)


def test_a_file_holds_the_moves(tmp_path: Path) -> None:
    plan = half()
    assert plan.schedule.moves
    text = plan.to_text()
    read = Plan.from_text(text)
    assert read.schedule.moves == plan.schedule.moves
    assert read.offload == plan.offload
    assert read.costs.link == plan.costs.link
    assert (read.predicted_ms, read.simulation) == (plan.predicted_ms, plan.simulation)
    assert read.to_text() == text
    model, eager = layers(), layers()
    other = tmp_path / "other"
    other.mkdir()
    module = RockmateModule(model, X, plan=read, offload=f"disk:{other}")
    same_gradients(module, eager, step)


def test_a_file_whose_schedule_reads_what_is_away_is_refused() -> None:
    plan = half()
    content = json.loads(plan.to_text())
    edited = copy.deepcopy(content)
    # A run less moves everything behind it by a step.
    backward = next(i for i, row in enumerate(edited["schedule"]) if row.startswith("backward"))
    edited["schedule"].insert(backward, edited["schedule"][backward])
    with pytest.raises(PlanFileError):
        Plan.from_text(json.dumps(edited))


def test_a_plan_says_what_moves() -> None:
    plan = half()
    move = plan.schedule.moves[0]
    text = str(plan.explain(plan.snapshot.storages[move.storage].name))
    assert f"copied out from step {move.send} on, gone before step {move.sent}" in text
    assert f"copied back from step {move.fetch} on, there before step {move.fetched}" in text
    assert "moved away and brought back" in text
    assert "brought back at" in text
    assert f"{len(plan.schedule.moves)} values to the disk and back" in plan.summary()
    assert "moved" in plan.block_table().splitlines()[0]
    assert "moved" in plan.tree().splitlines()[0]
    assert sum(size for _, size in plan.live_at_peak()) == plan.predicted_peak_bytes


def test_many_budgets_have_the_plans_of_each(tmp_path: Path) -> None:
    planner = planner_of(tmp_path)
    plans = planner.plans("0.3:1.0:20")
    plain = Planner(layers(), X, machine="cpu-avx2").plans("0.3:1.0:20")
    assert any(plan.schedule.moves for plan in plans.values())
    assert plans.keys() >= plain.keys()
    for budget, plan in plans.items():
        assert plan.predicted_peak_bytes <= budget
        assert budget not in plain or plan.predicted_ms <= plain[budget].predicted_ms * (1 + 1e-9)
    points = planner.frontier()
    assert all(one.predicted_ms > other.predicted_ms for one, other in pairwise(points))
