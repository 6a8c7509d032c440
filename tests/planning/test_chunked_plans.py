"""Plans in chunks: where they are chosen, what they say, and what is measured of them."""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
import torch
from chunk_cases import (
    CLASSES,
    chunked,
    distances,
    eager,
    gradients,
    make,
    sample,
    sorted_scores,
)
from layered import layered
from torch import Tensor, nn
from torch.nn import functional

import rockmate.step
from bench import models
from rockmate import InfeasibleBudgetError, Plan, PlanMismatchError, Planner, RockmateModule
from rockmate._torch.allocator import timeline
from rockmate.bound.protocol import MinBound
from rockmate.bound.solver_time import SolverTime
from rockmate.costs.measure import measure_costs
from rockmate.graph.parameters import owner_names
from rockmate.planning.candidate import linspace_int
from rockmate.planning.local_search import LocalSearch
from rockmate.runtime.autograd import Runner
from rockmate.runtime.emit import emit
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate
from rockmate.step import capture_step

# --- plans ----------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Words straight to many logits: nearly all of the step is its loss block."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4096, 64)
        self.head = nn.Linear(64, 4096, bias=False)

    def forward(self, words: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        return {
            "loss": functional.cross_entropy(
                self.head(torch.tanh(self.words(words))).flatten(0, 1), labels.flatten()
            )
        }


@functools.cache
def wide() -> tuple[Wide, dict[str, Tensor], Planner]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        words = torch.randint(0, 4096, (2, 128))
        model = Wide().train()
    batch = {"words": words, "labels": words.flip(0)}
    return model, batch, Planner(model, batch)


def test_chunks_only_for_budgets_that_nothing_else_meets() -> None:
    _, _, planner = wide()
    assert "loss_chunks" not in planner.plan(planner.minimum_peak_bytes).options
    below = planner.plan(planner.minimum_peak_bytes // 3)
    assert "loss_chunks" in below.options
    assert below.predicted_peak_bytes <= planner.minimum_peak_bytes // 3
    assert re.search(r"loss block +in \d+ chunks of its rows; .* \(head\)", below.summary())
    assert "loss block: in" in str(below.explain("head"))
    assert "not in chunks: it can be" in str(planner.plan(1.0).explain("head"))


def test_so_it_is_for_many_budgets_together() -> None:
    _, _, planner = wide()
    below = planner.minimum_peak_bytes // 3
    plans = planner.plans(
        [below, *linspace_int(planner.minimum_peak_bytes, 2 * planner.minimum_peak_bytes, 20)]
    )
    assert plans[below].schedule == planner.plan(below).schedule
    assert [budget for budget, plan in plans.items() if "loss_chunks" in plan.options] == [below]
    assert len(plans) == 21


@pytest.mark.parametrize("share", [0.35, 0.2])
def test_measured_peak_is_the_predicted_one(share: float) -> None:
    model, batch, planner = wide()
    module = planner.module(int(share * planner.minimum_peak_bytes))

    def step() -> None:
        module(**batch)["loss"].backward()

    step()
    ours = gradients(model)
    _, reference = eager(model, batch)
    assert max(distances(ours, reference).values()) <= 1e-6
    step()
    model.zero_grad(set_to_none=False)
    assert timeline(step).peak_bytes == pytest.approx(module.plan.predicted_peak_bytes, rel=0.02)
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("chunks", ["4 recompute", "4 at_once"])
def test_measured_peak_with_nothing_recomputed(chunks: str) -> None:
    model, batch, _ = wide()
    step = chunked(capture_step(model, batch), chunks)
    schedule = baseline_schedule(step.graph)
    program = emit(step.graph, schedule, owner_names(model))
    runner = Runner(program, model)

    def run() -> None:
        runner.run([batch[name] for name in sorted(batch)], hooks_last=False)[0].backward()

    run()
    model.zero_grad(set_to_none=False)
    predicted = simulate(step.graph, schedule, measure_costs(step.graph)).peak_bytes
    assert timeline(run).peak_bytes == pytest.approx(predicted, rel=0.02)
    model.zero_grad(set_to_none=True)


def test_planned_under_autocast() -> None:
    """Products, the log-softmax and the sums of chunks have the dtypes that they have without
    chunks: checked by gradients and peak."""
    model, batch, _ = wide()
    _, exact = eager(copy.deepcopy(model).double(), batch, 1024.0)
    _, rounded = eager(model, batch, 1024.0, autocast=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        planner = Planner(model, batch)
        module = planner.module(planner.minimum_peak_bytes * 2 // 5)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(**batch)["loss"]
        (loss * 1024.0).backward()

    step()
    ours, of_eager = distances(gradients(model), exact), distances(rounded, exact)
    assert all(ours[name] <= 1.01 * of_eager[name] for name in ours), (ours, of_eager)
    step()
    model.zero_grad(set_to_none=False)
    assert "loss_chunks" in module.plan.options
    assert timeline(step).peak_bytes <= module.plan.budget_bytes
    model.zero_grad(set_to_none=True)


def test_below_the_smallest_chunks() -> None:
    _, _, planner = wide()
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner.plan(1000)
    assert caught.value.minimum_bytes < planner.minimum_peak_bytes // 4
    assert (
        planner.plan(caught.value.minimum_bytes).predicted_peak_bytes == caught.value.minimum_bytes
    )
    with pytest.raises(InfeasibleBudgetError):
        planner.plan(int(0.89 * caught.value.minimum_bytes))


def test_plans_in_chunks_are_files_like_others() -> None:
    model, batch, planner = wide()
    plan = planner.plan(planner.minimum_peak_bytes // 3)
    loaded = Plan.from_text(plan.to_text())
    assert loaded.summary() == plan.summary()
    module = RockmateModule(model, batch, plan=loaded)
    module(**batch)["loss"].backward()
    ours = gradients(model)
    planner.module(plan.budget_bytes)(**batch)["loss"].backward()
    assert all(torch.equal(ours[name], gradient) for name, gradient in gradients(model).items())


def test_a_plan_in_chunks_for_a_loss_that_has_none() -> None:
    _, batch, planner = wide()
    plan = planner.plan(planner.minimum_peak_bytes // 3)
    with pytest.raises(
        PlanMismatchError, match=r"in chunks .* cannot be: .*sort.* has no rule.*Plan again"
    ):
        RockmateModule(make(sorted_scores), batch | {"words": batch["words"] % CLASSES}, plan=plan)


def test_not_allowed() -> None:
    model, batch, planner = wide()
    strict = Planner(model, batch, allow_chunking=False)
    with pytest.raises(InfeasibleBudgetError):
        strict.plan(planner.minimum_peak_bytes // 3)
    assert "allow_chunking=False" in str(strict.plan(1.0).explain("head"))


def test_allowed_wherever_they_are_faster() -> None:
    model, batch, planner = wide()
    free = Planner(model, batch, allow_chunking=True)
    assert free.minimum_peak_bytes < planner.minimum_peak_bytes // 4
    points = free.frontier()
    assert points[0].budget_bytes == free.minimum_peak_bytes
    assert free.plan(planner.minimum_peak_bytes).predicted_ms <= free.baseline_ms * 2


# --- the bound ------------------------------------------------------------------------------------


def plan_or_none(planner: Planner, budget_bytes: int) -> Plan | None:
    try:
        return planner.plan(budget_bytes)
    except InfeasibleBudgetError:
        return None


@pytest.mark.parametrize("allow_chunking", [None, True, False])
def test_no_plan_is_faster_than_the_bound_whatever_chunks_are_allowed(
    allow_chunking: bool | None,
) -> None:
    whole = layered(allow_chunking=False)
    unchunked, baseline = whole.minimum_peak_bytes, whole.baseline_peak_bytes
    planner = layered(allow_chunking)
    budgets = (
        unchunked // 4,
        unchunked // 2,
        unchunked - 1,
        unchunked,
        (unchunked + baseline) // 2,
        baseline,
    )
    for budget_bytes in budgets:
        bound_ms = planner.lower_bound_ms(budget_bytes)
        plan = plan_or_none(planner, budget_bytes)
        assert (plan is None) == (budget_bytes < unchunked and allow_chunking is False)
        if plan is not None:
            assert plan.predicted_ms >= bound_ms * (1 - 1e-9)
            assert plan.lower_bound_ms == bound_ms >= plan.quick_lower_bound_ms > 0
            assert Plan.from_text(plan.to_text()).lower_bound_ms == bound_ms
    faster = plan_or_none(planner, unchunked - 1)
    assert faster is None or faster.predicted_ms < whole.lower_bound_ms(
        unchunked - 1
    )  # so that of the step as captured does not hold


@pytest.mark.parametrize("strategy", ["chen", "rotor"])
def test_plans_to_compare_with_are_held_against_the_same_bound(strategy: str) -> None:
    planner = layered(allow_chunking=True)
    plan = planner.plan(planner.minimum_peak(strategy), strategy=strategy)
    assert plan.lower_bound_ms == planner.lower_bound_ms(plan.budget_bytes) <= plan.predicted_ms


def test_closer_bounds_are_asked_of_those_that_may_be_the_least() -> None:
    asked = []

    @dataclass
    class Known:
        quick_ms: float
        closer_ms: float

        def bound_ms(self, budget_bytes: int) -> float:
            return self.quick_ms + budget_bytes

        def tight_bound_ms(self, budget_bytes: int) -> float:
            asked.append(self.quick_ms)
            return self.closer_ms + budget_bytes

    least = MinBound(
        lambda: [
            Known(9.0, 9.0),
            Known(4.0, 6.0),
            Known(inf, inf),
            Known(5.0, 5.5),
            Known(3.0, 8.0),
            Known(5.75, 6.0),
        ]
    )
    assert least.bound_ms(10) == 13.0
    assert least.tight_bound_ms(10) == 15.5
    assert asked == [3.0, 4.0, 5.0]


# --- what is written out and solved ---------------------------------------------------------------


def test_few_of_the_schedules_in_chunks_are_thoroughly_improved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = layered(allow_chunking=None)
    budget_bytes = planner.minimum_peak_bytes - 1
    whole = planner._variants.unchunked.local_search
    calls = {"initial_within": 0, "best_within": 0}  # of steps in chunks

    def counted(name: str) -> None:
        right = getattr(LocalSearch, name)

        def count(self: LocalSearch, budget_bytes: int) -> object:
            calls[name] += self is not whole
            return right(self, budget_bytes)

        monkeypatch.setattr(LocalSearch, name, count)

    for name in calls:
        counted(name)
    plan = planner.plan(budget_bytes)
    assert "loss_chunks" in plan.options
    assert 1 <= calls["best_within"] < calls["initial_within"]
    assert plan.predicted_peak_bytes < plan.minimum_peak_bytes == planner.minimum_peak_bytes


class Smoothed(nn.Module):
    """A tied head, a soft cap, class weights and label smoothing.

    Everything that makes the loss block long.
    """

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2048, 32)
        self.head = nn.Linear(32, 2048, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("weight", torch.linspace(0.5, 2.0, 2048))

    def forward(self, words: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        scores = torch.tanh(self.head(self.words(words)) / 30.0) * 30.0
        return {
            "loss": functional.cross_entropy(
                scores.flatten(0, 1), labels.flatten(), weight=self.weight, label_smoothing=0.1
            )
        }


def test_long_loss_blocks_are_small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to an integer program, and no value of tokens x classes is in memory as a
    whole."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("an integer program is solved")

    monkeypatch.setattr(sys.modules["checkmate.pareto"], "solve_by_ilp", refuse)
    words = torch.randint(0, 2048, (2, 128), generator=torch.Generator().manual_seed(0))
    planner = Planner(
        Smoothed().train(), {"words": words, "labels": words.flip(0)}, allow_chunking=True
    )
    assert planner.minimum_peak_bytes < 256 * 2048 * 4 // 4
    assert planner.plan(planner.minimum_peak_bytes).num_unproved_blocks == 0


def test_solvers_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("rockmate.bound.solver_time.monotonic", lambda: now[0])
    solver_time = SolverTime(8.0)
    given = []
    for taken in (4.0, 1.0, 0.0, 3.0, 0.0):
        with solver_time.for_one_solve() as limit_s:
            given.append(limit_s)
            now[0] += taken
    assert given == [4.0, 2.0, 1.5, 1.5, pytest.approx(1e-3)]
    assert solver_time.spent_s == 8.0


def test_plans_without_time_to_solve(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convex hulls are there in any case, and never silently."""
    monkeypatch.setattr("rockmate.bound.solver_time._LEAST_S", 1e-9)
    model, batch, planner = wide()
    for budget in (planner.minimum_peak_bytes, planner.minimum_peak_bytes // 3):
        caplog.clear()
        plan = Planner(model, batch, time_limit_s=1e-9).plan(budget)
        assert plan.predicted_peak_bytes <= budget
        assert plan.num_unproved_blocks > 0
        assert "the solver stopped at its time limit of" in caplog.text
        assert "the lower bound comes from convex hulls" in caplog.text
        assert "a larger time_limit_s may help" in plan.summary()
    with pytest.raises(ValueError, match=r"time_limit_s is 0\.0; it must be above 0"):
        Planner(model, batch, time_limit_s=0.0)


def test_where_blocks_could_run_in_chunks_is_found_when_a_note_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    right = rockmate.step.separable_blocks

    def separable_blocks(*args: Any, **named: Any) -> object:
        asked.append(args)
        return right(*args, **named)

    monkeypatch.setattr(rockmate.step, "separable_blocks", separable_blocks)
    workload = models.build("gpt2", tiny=True)
    planner = Planner(workload.model, workload.sample)
    plan = planner.plan(0.7)
    planner.plans("0.6:1.0:20")
    assert not asked
    assert plan.loss_block.text.startswith("not in chunks: ")
    assert planner.plan(0.8).loss_block == plan.loss_block
    assert len(asked) == 1


def test_the_reason_is_told() -> None:
    plan = Planner(make(sorted_scores), sample()).plan(1.0)
    assert "loss block: not in chunks: aten.sort.default" in str(plan.explain("head"))
    assert "loss block" not in str(plan.explain("words"))
