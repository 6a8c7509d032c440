"""Plans in chunks: where they are chosen, what they say, and what is measured of them."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from math import inf
from typing import Any

import pytest
import torch
from chunk_cases import CLASSES, chunked, distances, eager, gradients, make, sample, sorted_scores
from layered import layered
from made_of import made_of
from torch import Tensor, nn
from torch.nn import functional

import rockmate.planning.chunkable_blocks
from bench import models
from rockmate import InfeasibleBudgetError, Plan, PlanMismatchError, Planner, RockmateModule
from rockmate._torch.allocator import timeline
from rockmate.capture.options import Numerics
from rockmate.costs.cost import scaled_times
from rockmate.costs.measure import measure_costs
from rockmate.graph.chunking.chunks import Chunks
from rockmate.graph.parameters import owner_names
from rockmate.planning.candidate import linspace_int
from rockmate.planning.form import Form
from rockmate.planning.local_search import LocalSearch
from rockmate.planning.step import CapturedStep, capture_step
from rockmate.runtime.autograd import Runner
from rockmate.runtime.emit import emit
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate

# --- plans ----------------------------------------------------------------------------------------


@made_of(lambda: {"words": nn.Embedding(4096, 64), "head": nn.Linear(64, 4096, bias=False)})
class Wide(nn.Module):
    """Words straight to many logits: nearly all of the step is its loss block."""

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


def test_chunks_where_nothing_else_fits_and_none_where_there_is_room() -> None:
    _, _, planner = wide()
    roomy = planner.plan(1.0)
    assert not roomy.options.loss_chunks
    assert roomy.bitwise_ms is None
    below = planner.plan(planner.minimum_peak_bytes // 3)
    assert below.options.loss_chunks
    assert below.predicted_peak_bytes <= planner.minimum_peak_bytes // 3
    assert re.search(r"loss block +in \d+ chunks of its rows; .* \(head\)", below.summary())
    assert "no plan without chunks fits the budget" in below.summary()
    assert Plan.from_text(below.to_text()).bitwise_ms == below.bitwise_ms == inf
    assert "loss block: in" in str(below.explain("head"))
    assert "not in chunks: it can be" in str(planner.plan(1.0).explain("head"))


def test_where_chunks_are_faster_by_more_than_noise() -> None:
    """One by one, from the largest budget down, nothing is handed on that could hide a slow one."""
    whole = layered(numerics="bitwise")
    budgets = linspace_int(whole.minimum_peak_bytes // 2, whole.baseline_peak_bytes, 30)
    together = layered().plans(budgets)
    planner = layered()
    alone = {each: planner._forms.best_within(each, "rockmate") for each in reversed(budgets)}
    num_chunked = 0
    for budget, plan in together.items():
        found = alone[budget]
        assert found is not None
        bitwise = whole._forms.best_within(budget, "rockmate")
        whole_ms = inf if bitwise is None else bitwise.time_ms
        for options, ms in (
            (found.form.step.options, found.time_ms),
            (plan.options, plan.predicted_ms),
        ):
            assert ms <= whole_ms * 1.001
            assert ms >= whole.baseline_ms * (1.01 - 1e-9) or not options.loss_chunks
        num_chunked += plan.options.loss_chunks is not None
        if plan.options.loss_chunks and plan.bitwise_ms != inf:
            assert plan.bitwise_ms == pytest.approx(whole_ms)
            assert "x without chunks, with numerics=" in plan.summary()
    times = [found.time_ms for found in filter(None, alone.values())]
    assert times == sorted(times)
    assert 5 < num_chunked < len(together) == 30
    assert not together[budgets[-1]].options.loss_chunks


def test_chunks_that_are_measured_as_faster_are_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the time in chunks is no reason for chunks where the step has room."""
    planner = layered()
    (forms,) = planner._forms.chunked
    right = forms._form_of  # pyright: ignore[reportPrivateUsage]

    def halved(step: CapturedStep) -> Form:
        form = right(step)
        return Form(step, scaled_times(form.costs, 0.5))

    monkeypatch.setattr(forms, "_form_of", halved)
    chunked = forms.form(Chunks(4, "at_once"))
    assert chunked is not None
    assert chunked.baseline.time_ms == pytest.approx(1.01 * planner.baseline_ms)
    assert not planner.plan(1.0).options.loss_chunks


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
    assert module.plan.options.loss_chunks
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
    strict = Planner(model, batch, numerics="bitwise")
    with pytest.raises(InfeasibleBudgetError):
        strict.plan(planner.minimum_peak_bytes // 3)
    assert "numerics='bitwise'" in str(strict.plan(1.0).explain("head"))


def test_the_frontier_begins_at_the_smallest_peak_in_chunks() -> None:
    _, _, planner = wide()
    points = planner.frontier()
    assert points[0].budget_bytes < planner.minimum_peak_bytes // 4
    assert planner.frontier(strategy="bitwise")[0].budget_bytes == planner.minimum_peak_bytes
    assert planner.plan(planner.minimum_peak_bytes).predicted_ms <= planner.baseline_ms * 2


def test_the_strategy_bitwise_is_the_default_with_bitwise_numerics() -> None:
    default, bitwise = layered(), layered(numerics="bitwise")
    budget = default.minimum_peak_bytes
    plan = default.plan(budget, strategy="bitwise")
    assert plan.schedule == bitwise.plan(budget).schedule
    assert plan.strategy == "bitwise"
    assert default.plan(budget).predicted_ms < 0.99 * plan.predicted_ms


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numerics": "exact"}, "choose 'any_order' or 'bitwise'"),
        ({"numerics": "bitwise", "kernels": "auto"}, "kernels='auto' chooses"),
    ],
)
def test_numerics_that_cannot_be_kept(options: dict[str, Any], message: str) -> None:
    model, batch, _ = wide()
    with pytest.raises(ValueError, match=message):
        Planner(model, batch, **options)
    with pytest.raises(TypeError, match="allow_chunking"):
        RockmateModule(model, batch, 0.5, allow_chunking=False)


# --- the bound ------------------------------------------------------------------------------------


def plan_or_none(planner: Planner, budget_bytes: int) -> Plan | None:
    try:
        return planner.plan(budget_bytes)
    except InfeasibleBudgetError:
        return None


@pytest.mark.parametrize("numerics", ["any_order", "bitwise"])
def test_no_plan_is_faster_than_the_bound_with_chunks_and_without(numerics: Numerics) -> None:
    whole = layered(numerics="bitwise")
    unchunked, baseline = whole.minimum_peak_bytes, whole.baseline_peak_bytes
    planner = layered(numerics)
    budgets = (unchunked // 4, unchunked // 2, unchunked - 1, unchunked)
    budgets += ((unchunked + baseline) // 2, baseline)
    for budget_bytes in budgets:
        bound_ms = planner.lower_bound_ms(budget_bytes)
        plan = plan_or_none(planner, budget_bytes)
        assert (plan is None) == (budget_bytes < unchunked and numerics == "bitwise")
        if plan is not None:
            assert plan.predicted_ms >= bound_ms * (1 - 1e-9)
            assert plan.lower_bound_ms == bound_ms > 0
            assert Plan.from_text(plan.to_text()).lower_bound_ms == bound_ms
    faster = plan_or_none(planner, unchunked - 1)
    # so that of the step as captured does not hold
    assert faster is None or faster.predicted_ms < whole.lower_bound_ms(unchunked - 1)


@pytest.mark.parametrize("strategy", ["chen", "rotor"])
def test_plans_to_compare_with_are_held_against_the_same_bound(strategy: str) -> None:
    planner = layered()
    plan = planner.plan(planner.minimum_peak(strategy), strategy=strategy)
    assert plan.lower_bound_ms == planner.lower_bound_ms(plan.budget_bytes) <= plan.predicted_ms


# --- what is written out and solved ---------------------------------------------------------------


def test_few_of_the_schedules_in_chunks_are_thoroughly_improved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = layered()
    budget_bytes = planner.minimum_peak_bytes - 1
    whole = planner._forms.captured
    calls = {"quick_start": 0, "best_within": 0}  # of steps in chunks

    def counted(kind: type, name: str) -> None:
        right = getattr(kind, name)

        def count(self: object, budget_bytes: int) -> object:
            calls[name] += self not in (whole, whole.local_search)
            return right(self, budget_bytes)

        monkeypatch.setattr(kind, name, count)

    counted(Form, "quick_start")
    counted(LocalSearch, "best_within")
    plan = planner.plan(budget_bytes)
    assert plan.options.loss_chunks
    assert 1 <= calls["best_within"] < calls["quick_start"]
    assert plan.predicted_peak_bytes < plan.minimum_peak_bytes == planner.minimum_peak_bytes


def test_where_blocks_could_run_in_chunks_is_found_when_a_note_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    right = rockmate.planning.chunkable_blocks.separable_blocks

    def separable_blocks(*args: Any, **named: Any) -> object:
        asked.append(args)
        return right(*args, **named)

    monkeypatch.setattr(rockmate.planning.chunkable_blocks, "separable_blocks", separable_blocks)
    workload = models.build("gpt2", tiny=True)
    planner = Planner(workload.model, workload.sample, numerics="bitwise")
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
