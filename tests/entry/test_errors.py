"""Bad input is refused with an error that names the value, the limit and the next step."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from helpers import differing, gradients_of, modules_of, planned
from made_of import made_of
from torch import Tensor, nn
from torch.ao.quantization import default_fused_per_channel_wt_fake_quant
from torch.nn import functional

from rockmate import (
    BackwardError,
    InfeasibleBudgetError,
    InvalidBudgetError,
    InvalidSampleError,
    Planner,
    RockmateError,
    RockmateModule,
    SignatureMismatchError,
    UnsupportedModelError,
)

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(11))


# --- budgets --------------------------------------------------------------------------------------


UNREADABLE = (
    *(0, -5, float("nan"), float("inf"), 1.5, 0.0, -0.25, "12 parsecs", "0GB", "", "GB", "-3GB"),
    *("1e9", "5 5 GB", True, False, None, [1], 1j, torch.tensor(0.5), b"6GiB"),
)


@pytest.mark.parametrize("budget", UNREADABLE)
def test_unreadable_budget(budget: Any) -> None:
    planner = planned("mlp").planner
    with pytest.raises(InvalidBudgetError) as caught:
        planner.plan(budget)
    assert isinstance(caught.value, ValueError)
    text = str(caught.value)
    assert repr(budget) in text or str(budget) in text
    assert "6GiB" in text, "says what to write"


@pytest.mark.parametrize(
    ("budget", "written"), [("0.5", "0.5"), (" 0.70 ", "0.7"), (".25", "0.25"), ("1.0", "1.0")]
)
def test_fraction_in_quotes(budget: str, written: str) -> None:
    with pytest.raises(InvalidBudgetError, match=re.escape(f"{budget!r} is text")) as caught:
        RockmateModule(models.Stack(), X, budget)
    assert f"A fraction is a float: write {written}, without quotes." in str(caught.value)


@pytest.mark.parametrize("name", models.TINY)
def test_infeasible_budget_names_a_minimum_that_works(name: str) -> None:
    case = planned(name)
    with pytest.raises(InfeasibleBudgetError) as caught:
        case.planner.plan(1000)
    error = caught.value
    assert error.budget_bytes == 1000
    assert error.minimum_bytes <= case.planner.minimum_peak_bytes  # below that, in chunks
    text = str(error)
    assert "1,000" in text
    assert f"{error.minimum_bytes:,}" in text
    assert re.search(r"\d\.\d\dx", text), "says how slow the smallest plan is"
    assert "budget=" in text
    with pytest.raises(InfeasibleBudgetError):
        case.planner.plan(int(0.89 * error.minimum_bytes))
    assert case.planner.plan(error.minimum_bytes).predicted_peak_bytes <= error.minimum_bytes
    module = case.planner.module(error.minimum_bytes)
    _, loss = case.workload.loss(module, case.workload.make_batch(1))
    loss.backward()
    assert gradients_of(case.workload.model)


@pytest.mark.parametrize("name", models.TINY)
def test_a_budget_just_below_the_minimum_is_met_if_the_plan_there_needs_no_more(name: str) -> None:
    workload = models.tiny(name)
    planner = Planner(workload.model, workload.sample, numerics="bitwise")
    at_minimum = planner.plan(planner.minimum_peak_bytes)
    plan = planner.plan(at_minimum.predicted_peak_bytes)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.predicted_ms == at_minimum.predicted_ms
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner.plan(
            min(at_minimum.predicted_peak_bytes, int(0.9 * planner.minimum_peak_bytes)) - 1
        )
    assert caught.value.minimum_bytes == planner.minimum_peak_bytes


def test_budget_forms_agree() -> None:
    planner = planned("gpt2").planner
    num_bytes = 300 * 1024
    plans = [
        planner.plan(budget)
        for budget in (num_bytes, "300KiB", " 300 kib ", "0.29296875MiB", np.int64(num_bytes))
    ]
    assert {plan.budget_bytes for plan in plans} == {num_bytes}
    assert {plan.schedule for plan in plans} == {plans[0].schedule}
    assert planner.plan(1.0).budget_bytes == planner.baseline_peak_bytes
    assert planner.plan("1TB").predicted_ms == planner.plan(1.0).predicted_ms


# --- samples and models ---------------------------------------------------------------------------


def test_sample_on_another_device() -> None:
    with pytest.raises(InvalidSampleError, match=r"meta.*cpu"):
        Planner(models.Stack(), X.to("meta"))


def test_model_on_two_devices() -> None:
    model = models.Stack()
    model.layers[1].to("meta")
    with pytest.raises(InvalidSampleError, match="meta"):
        Planner(model, X)


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (torch.randn(64, 15), "15"),
        (torch.randint(0, 3, (64, 16)), "Long|Int|dtype"),
        ((X, X), "argument"),
        ({"y": X}, "y"),
        ({}, "x"),
        ((), "x"),
        ({"x": None}, "x"),
    ],
)
def test_sample_that_the_model_rejects(sample: Any, text: str) -> None:
    with pytest.raises(InvalidSampleError, match=text) as caught:
        Planner(models.Stack(), sample)
    assert "Stack" in str(caught.value) or "layers.0.0" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (torch.OutOfMemoryError("no memory"), RockmateError, "out of memory.*batch smaller"),
        (NotImplementedError("no kernel"), UnsupportedModelError, "cannot be captured"),
        (RuntimeError("INTERNAL ASSERT FAILED"), UnsupportedModelError, "cannot be captured"),
        (RuntimeError("sizes do not match"), InvalidSampleError, "raised on the sample"),
    ],
)
def test_the_sample_is_blamed_for_its_own_faults_alone(
    error: Exception, kind: type[Exception], text: str
) -> None:
    class Raising(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error

    with pytest.raises(RockmateError, match=text) as caught:
        Planner(nn.Sequential(nn.Linear(16, 16), Raising()), X)
    assert type(caught.value) is kind
    assert "Raising" in str(caught.value) or "in 1" in str(caught.value)


@pytest.mark.parametrize("sample", [3, "text", None, 0.5, {1, 2}, object()])
def test_sample_of_no_known_form(sample: Any) -> None:
    with pytest.raises(InvalidSampleError, match=r"tensor.*tuple.*mapping"):
        Planner(models.Stack(), sample)


@made_of(lambda: {"linear": nn.Linear(16, 16)})
class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.sum() > 0:  # the line that the error names
            x = x * 2
        return x


class Selecting(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x[x > 0]  # the line that the error names


class Reading(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.linear(x).max().item()  # the line that the error names


class Counting(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[: int(self.linear(x)[0, 0])]  # the line that the error names


@pytest.mark.parametrize("cls", [Branching, Selecting, Reading, Counting])
def test_data_dependent_model_names_the_line(cls: type[nn.Module]) -> None:
    lines = Path(__file__).read_text().splitlines()
    beginning = [line.startswith(f"class {cls.__name__}(") for line in lines].index(True)
    named = ["the line that the error names" in line for line in lines].index(True, beginning) + 1
    with pytest.raises(UnsupportedModelError) as caught:
        Planner(cls(), X)
    assert f"{Path(__file__).name}:{named}" in str(caught.value)
    assert "tensor operation" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [(nn.Module.eval, r"train\(\)"), (lambda model: model.requires_grad_(False), "Unfreeze")],
)
def test_model_that_does_not_train(change: Any, text: str) -> None:
    with pytest.raises(InvalidSampleError, match=text):
        Planner(change(models.Stack()), X)


def test_planning_under_no_grad() -> None:
    model = models.Stack()
    with torch.no_grad():
        planner = Planner(model, X)
    planner.module(1.0)(X).sum().backward()
    assert len(gradients_of(model)) == 16


@pytest.mark.parametrize("made", [object(), models, lambda: None, {1, 2}, np.zeros(2)])
def test_output_of_no_known_kind(made: Any) -> None:
    model = models.WithOutput(lambda loss, logits, hidden, x: {"loss": loss, "other": made})
    with pytest.raises(UnsupportedModelError, match="output") as caught:
        Planner(model, X)
    assert type(made).__name__ in str(caught.value)


def test_error_of_the_models_own_is_kept_as_the_cause() -> None:
    class Failing(Branching):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("the model's own")

    with pytest.raises(RockmateError, match="the model's own") as caught:
        Planner(Failing(), X)
    assert Path(__file__).name in str(caught.value)


def test_loss_only_without_a_loss() -> None:
    with pytest.raises(InvalidSampleError, match="outputs"):
        Planner(models.Stack(), X, outputs="loss")


@pytest.mark.parametrize("option", ["differentiable", "outputs", "gradients"])
def test_unknown_option_value(option: str) -> None:
    with pytest.raises(ValueError, match="sideways"):
        Planner(models.Stack(), X, **{option: "sideways"})


# --- later calls ----------------------------------------------------------------------------------


class Looking(nn.Module):
    """Looks rows up, behind what draws and counts; its middle may be opaque."""

    def __init__(self, middle: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.table = nn.BatchNorm1d(8), nn.Embedding(4, 8)
        self.middle, self.head = middle(8, 8), nn.Linear(8, 8)

    def forward(self, places: Tensor) -> Tensor:
        x = self.norm(torch.randn(len(places), 8)) + self.table(places)
        found = self.middle(x)
        return self.head(found[0] if isinstance(found, tuple) else found)


@pytest.mark.parametrize("middle", [nn.Linear, nn.LSTM])
def test_an_error_of_a_planned_step_leaves_what_it_leaves_in_eager(middle: Any) -> None:
    outcomes = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = Looking(middle)
        module, left = RockmateModule(model, None, 1.0) if is_planned else model, []
        for step in range(4):  # the first one plans, the third is no trial
            try:
                module(torch.tensor([0, 1, 2, 3 if step % 2 else 9]))
                left.append("")
            except IndexError as error:
                left.append(str(error))
            left += [torch.get_rng_state().tolist(), *(each.tolist() for each in model.buffers())]
        outcomes.append(left)
    assert outcomes[0] == outcomes[1]


def test_a_buffer_that_the_first_call_resizes_is_refused_and_no_other_is_written() -> None:
    quantized = default_fused_per_channel_wt_fake_quant

    @made_of(lambda: {"norm": nn.BatchNorm1d(16), "linear": nn.Linear(16, 8), "fake": quantized()})
    class Quantized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(self.norm(x), self.fake(self.linear.weight))

    model = Quantized()
    module = RockmateModule(model, X, 1.0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedModelError, match="resizes fake"):
        module(X)
    assert not differing(model.state_dict(), before)


@pytest.mark.parametrize(
    "batch",
    [
        lambda b: {**b, "input_ids": b["input_ids"][:1], "labels": b["labels"][:1]},
        lambda b: {**b, "input_ids": b["input_ids"][:, :7], "labels": b["labels"][:, :7]},
        lambda b: {**b, "input_ids": b["input_ids"].int()},
        lambda b: {"input_ids": b["input_ids"]},
        lambda b: {**b, "attention_mask": torch.ones_like(b["input_ids"])},
        lambda b: {**b, "output_hidden_states": True},
        lambda b: {**b, "input_ids": b["input_ids"].to("meta")},
        lambda b: {**b, "return_dict": False},
    ],
)
def test_call_unlike_the_sample_names_both(batch: Any) -> None:
    case = planned("gpt2")
    module = case.module("binding")
    given = batch(dict(case.workload.make_batch(1)))
    with pytest.raises(SignatureMismatchError) as caught:
        module(**given)
    text = str(caught.value)
    assert "int64[2, 16]" in text
    assert "planned" in text
    assert "called" in text
    assert "RockmateModule" in text
    module(**case.workload.make_batch(1)).loss.backward()


def test_constant_of_another_value_or_type() -> None:
    class Scaling(models.Stack):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    @made_of(lambda: {"linear": nn.Linear(16, 16)})
    class Integers(nn.Module):
        def forward(self, x: Tensor, which: object) -> Tensor:
            return self.linear(x) + (
                1 if isinstance(which, bool) else 2 if isinstance(which, int) else 3
            )

    module = RockmateModule(Scaling(), {"x": X, "scale": 2.0}, 1.0, replan=False)
    with pytest.raises(SignatureMismatchError, match=r"2\.0[\s\S]*3\.0"):
        module(x=X, scale=3.0)
    module = RockmateModule(Integers(), {"x": X, "which": 1}, 1.0, replan=False)
    for which in (True, 1.0):
        with pytest.raises(SignatureMismatchError):
            module(x=X, which=which)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.layers[1][0].weight.requires_grad_(False), r"layers\.1\.0\.weight"),
        (lambda m: m.layers[1].eval(), "eval"),
        (lambda m: m.layers[1].__setitem__(0, nn.Linear(16, 32)), r"layers\.1\.0|replaced"),
        (lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(1))), "extra"),
        (lambda m: setattr(m.layers[1][2], "p", 0.9), r"p of a Dropout was 0\.1 and is 0\.9"),
        (lambda m: m.layers[1].register_forward_hook(lambda *_: None), "hook"),
        (lambda m: torch.set_autocast_enabled("cpu", True), "autocast"),
    ],
)
def test_model_changed_after_planning(change: Any, text: str) -> None:
    model = models.Stack()
    module = RockmateModule(model, X, 1.0, replan=False)
    change(model)
    try:
        with pytest.raises(SignatureMismatchError, match=text):
            module(X)
    finally:
        torch.set_autocast_enabled("cpu", False)


# --- backwards ------------------------------------------------------------------------------------


def test_backward_twice_with_a_scalar_from_inside() -> None:
    module = planned("gpt2").module("binding")
    loss = module(**planned("gpt2").workload.make_batch(1)).loss
    loss.backward()
    with pytest.raises(BackwardError, match="retain_graph=True"):
        loss.backward()


def test_second_derivative() -> None:
    for gradients in ("accumulated", "returned"):
        for module in modules_of(models.Stack(), X, gradients=gradients):
            loss = module(X).square().sum()
            with pytest.raises(BackwardError, match="create_graph"):
                loss.backward(create_graph=True)
            del loss


@pytest.mark.parametrize("changed", ["parameter", "input"])
def test_changed_in_place_between_forward_and_backward(changed: str) -> None:
    model, x = models.Stack(), X.clone()
    for module in modules_of(model, x):
        loss = module(x).square().sum()
        with torch.no_grad():
            (x if changed == "input" else model.layers[2][3].weight).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss


def test_output_changed_in_place_that_the_backward_reads() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    reference = copy.deepcopy(model)
    for module in (reference, *modules_of(model, X)):
        y = module(X)
        loss = y.square().sum()
        with torch.no_grad():
            y.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss, y


def _small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 4))


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 2))
    with pytest.raises(UnsupportedModelError, match="sparse=False"):
        Planner(model, torch.randint(0, 20, (4,)))


def test_a_forward_that_draws_from_python_is_refused_and_leaves_no_trace() -> None:
    @made_of(lambda: {"layer": nn.Linear(4, 4), "calls": 0})
    class LayerDrop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x) if random.random() < 0.5 else self.layer(x) * 2

    model = LayerDrop()
    before = random.getstate()
    with pytest.raises(UnsupportedModelError, match="Python's"):
        Planner(model, torch.randn(2, 4))
    assert random.getstate() == before
    assert model.calls == 0


@pytest.mark.parametrize("way", ["seed", "fork"])
def test_a_forward_that_sets_the_random_state_is_refused(way: str) -> None:
    @made_of(lambda: {"layer": nn.Linear(4, 4)})
    class Seeded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if way == "seed":
                torch.manual_seed(3)
                return nn.functional.dropout(self.layer(x))
            with torch.random.fork_rng(devices=[]):
                return nn.functional.dropout(self.layer(x))

    model, seed = Seeded(), torch.manual_seed
    with pytest.raises(UnsupportedModelError, match="sets torch's random state"):
        Planner(model, torch.randn(2, 4))
    assert torch.manual_seed is seed


def test_gradients_go_to_the_parameters_that_the_forward_ran_with() -> None:
    model, x = _small_net(), torch.randn(8, 16)
    module = RockmateModule(model, x, 1.0)
    output = module(x)
    first = model[0].weight
    model[0].weight = nn.Parameter(first.detach().clone())
    output.sum().backward()
    assert first.grad is not None
    assert model[0].weight.grad is None


def test_parameters_that_are_computed_are_refused() -> None:
    model, x = _small_net(), torch.randn(8, 16)
    module = RockmateModule(model, x, 1.0)
    doubled = {name: value * 2 for name, value in model.named_parameters()}
    with pytest.raises(SignatureMismatchError, match="computed from other tensors"):
        torch.func.functional_call(module, doubled, (x,))


@made_of(lambda kind: {"kind": kind, "layer": nn.Linear(6, 6)})
class _ByPosition(nn.Module):
    """Reads or writes by positions in the storage of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "read":
            return torch.as_strided(x, (2, 2), (3, 1), 0) * self.layer.weight[:2, :2]
        given = x if self.kind == "written input" else self.layer(x)[1:].detach()
        return torch.as_strided_scatter(given, self.layer.weight[:2, :2], (2, 2), (3, 1), 7)


@pytest.mark.parametrize("kind", ["read", "written input", "written view"])
def test_positions_in_the_storage_of_a_view_are_refused(kind: str) -> None:
    """A plan's input need not lie within a larger tensor, as eager's does."""
    model, x = _ByPosition(kind), torch.randn(7, 7)[1:, 1:]
    with pytest.raises(UnsupportedModelError, match=r"as_strided.*positions.*Clone.*frames"):
        RockmateModule(model, x, 1.0)
    framed = RockmateModule(model, None, 1.0, mode="frames")
    assert torch.equal(framed(x), model(x))
