"""Plans with fused kernels: predicted peaks, equal bits at every budget, eager's numbers up to
rounding, and everything else that a training script does."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from helpers import REGIMES, assert_gradients_alike, budget_for
from torch import Tensor, nn

import rockmate
from bench import measure
from rockmate import Plan, PlanMismatchError, Planner, RockmateModule
from rockmate.ops.rng import CPU_STATE_BYTES
from rockmate.planning.session import PlanningSession

NAMES = ("gpt2", "llama", "encoder", "hf-resnet")


@functools.cache
def case(name: str) -> tuple[Any, Planner, dict[str, Tensor]]:
    """The workload, its planner with fused kernels, and the weights that it began with."""
    workload = models.tiny(name).with_loss_inside()
    before = {key: value.clone() for key, value in workload.model.state_dict().items()}
    planner = Planner(workload.model, workload.sample, kernels="fused", numerics="bitwise")
    return workload, planner, before


def step(workload: Any, callee: nn.Module, owner: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    owner.zero_grad(set_to_none=True)
    _, loss = workload.loss(callee, workload.make_batch(seed))
    loss.backward()
    found = {name: p.grad.clone() for name, p in owner.named_parameters() if p.grad is not None}
    return {**found, "loss": loss.detach(), "state": torch.get_rng_state()}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_same_bits_at_every_budget(name: str) -> None:
    workload, planner, before = case(name)
    found = []
    for regime in REGIMES:
        workload.model.load_state_dict(before)
        module = planner.module(budget_for(planner, regime))
        found.append(step(workload, module, workload.model))
    assert planner.plan(planner.minimum_peak_bytes).schedule.num_recomputations() > 0
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[key], found[0][key]) for key in other)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_as_near_to_float64_as_eagers(name: str) -> None:
    workload, planner, before = case(name)
    workload.model.load_state_dict(before)
    module = planner.module(planner.minimum_peak_bytes)
    eager = copy.deepcopy(workload.model).train()
    ours, theirs = step(workload, module, workload.model), step(workload, eager, eager)
    assert torch.equal(ours["state"], theirs["state"])
    assert ours.keys() == theirs.keys()
    scale = max(float(value.abs().max()) for key, value in theirs.items() if key != "state")
    for key in ours.keys() - {"state"}:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("regime", REGIMES)
def test_measured_peaks_are_the_predicted_ones(name: str, regime: str) -> None:
    workload, planner, before = case(name)
    workload.model.load_state_dict(before)
    module = planner.module(budget_for(planner, regime))
    step(workload, module, workload.model)
    workload.model.zero_grad(set_to_none=False)

    batch = workload.make_batch(0)
    peak = measure.allocator_peak(lambda: measure.training_step(workload, module, batch, seed=0))
    # While a random op runs again, the present state of the generator waits on the heap, too.
    recomputed = module.plan.recompute_counts
    waits = any(module.plan.snapshot.ops[index].is_random for index in recomputed)
    slack_bytes = CPU_STATE_BYTES if waits else 0
    assert peak <= module.plan.predicted_peak_bytes + slack_bytes
    assert peak >= 0.995 * module.plan.predicted_peak_bytes
    assert module.plan.predicted_peak_bytes <= module.plan.budget_bytes


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_without_recomputation_is_no_higher_than_with_single_ops(name: str) -> None:
    workload, planner, _ = case(name)
    single = Planner(workload.model, workload.sample)
    assert planner.baseline_peak_bytes <= single.baseline_peak_bytes
    assert planner.fusion is not None
    assert planner.fusion.num_places > 0


def test_auto_is_never_slower_than_either_form_and_prefers_what_fits() -> None:
    workload, _, _ = case("gpt2")
    auto = PlanningSession(workload.model, workload.sample, kernels="auto")
    forms = [each.whole for each in auto._forms.chunked]
    assert len(forms) == 2
    smallest = auto.minimum_peak_bytes
    assert smallest == min(form.local_search.minimum().peak_bytes for form in forms)
    for budget in (auto.baseline_peak_bytes, smallest):
        best = [form.local_search.best_within(budget) for form in forms]
        expected = min(candidate.time_ms for candidate in filter(None, best))
        plan = auto.plan(budget)
        assert plan.predicted_ms == expected
        assert plan.lower_bound_ms <= plan.predicted_ms
        auto.planned_call(budget)


def test_auto_considers_kernels_that_are_slower_but_save_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload, _, before = case("gpt2")
    workload.model.load_state_dict(before)
    monkeypatch.setattr("rockmate.fusion.kernels._COMPILED", {})
    times = iter([2.0, 1.0] * 1000)
    monkeypatch.setattr("rockmate.fusion.kernels.time_ms", lambda *_: next(times))
    auto = PlanningSession(workload.model, workload.sample, kernels="auto")
    single, fused, whole = (each.whole for each in auto._forms.chunked)
    assert fused.step.fusion is not None
    assert whole.step.fusion is not None
    assert fused.step.fusion.report.num_places == 0
    assert whole.step.fusion.report.num_places > 0
    smallest = whole.local_search.minimum().peak_bytes
    assert smallest < single.local_search.minimum().peak_bytes
    plan = auto.plan(smallest)
    assert plan.options.kernels == "fused"
    assert plan.options.unfused == whole.step.options.unfused
    plan.save(tmp_path / "plan.json")
    loaded = RockmateModule(workload.model, workload.sample, plan=Plan.load(tmp_path / "plan.json"))
    torch.testing.assert_close(
        step(workload, loaded, workload.model)["loss"],
        step(workload, workload.model, workload.model)["loss"],
    )


def test_a_plan_file_holds_the_groups(tmp_path: Path) -> None:
    workload, planner, before = case("gpt2")
    workload.model.load_state_dict(before)
    plan = planner.plan(planner.minimum_peak_bytes)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.options.kernels == "fused"
    assert "groups that run as one kernel" in loaded.summary()
    assert "groups of ops run as" in plan.summary()
    module = RockmateModule(workload.model, workload.sample, plan=loaded)
    twin = planner.module_of(plan)
    first, second = (step(workload, each, workload.model) for each in (module, twin))
    assert all(torch.equal(first[key], second[key]) for key in first)
    unfused = Planner(workload.model, workload.sample).plan(1.0)
    with pytest.raises(PlanMismatchError):
        planner._step.planned_call(unfused)


def test_as_the_backend_of_torch_compile() -> None:
    torch.manual_seed(0)
    model = models.Stack(num_layers=2, width=64).train()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="rockmate", options={"budget": 0.8, "kernels": "fused"})
    x = torch.randn(64, 64)
    for callee in (compiled, eager):
        torch.manual_seed(1)
        callee(x).square().mean().backward()
    plan = rockmate.planned_graphs()[-1].plan
    assert plan is not None
    assert plan.fusion is not None
    assert plan.fusion.num_places > 0
    assert_gradients_alike(model, eager, rtol=1e-4, atol=1e-6)
    torch.compiler.reset()


def test_marked_values_stay_results_of_their_own_ops() -> None:
    def forward_gelus(**marks: Any) -> list[str]:
        model = models.Stack(num_layers=2, width=64).train()
        # For a machine that is described, every group is taken.
        planner = Planner(
            model, (torch.randn(64, 64),), kernels="fused", machine="cpu-avx2", **marks
        )
        return [op.name for op in planner.plan(1.0).graph.forward_ops if op.name.startswith("gelu")]

    assert not forward_gelus()
    assert len(forward_gelus(marks={"aten.gelu": "save"})) == 2
