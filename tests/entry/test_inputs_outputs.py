"""Every form of input and output, and of what is trained.

Frozen, tied, unused, adapters, dict and dataclass outputs.
"""

from __future__ import annotations

import collections
import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from helpers import (
    REGIMES,
    assert_alike,
    assert_gradients_alike,
    assert_same_steps,
    budget_for,
    check_against_eager,
    differing,
    gradients_of,
    modules_of,
    planned,
    same_bits,
    same_gradients,
    tensors_of,
    train,
)
from made_of import made_of, mlp
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

from rockmate import (
    BackwardError,
    Planner,
    RockmateModule,
    SignatureMismatchError,
    UnsupportedModelError,
    timeline,
)
from rockmate.trial.evidence import Evidence

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(11))


def mean_square(module: nn.Module, step: int) -> tuple[None, Tensor]:
    return None, module(X * step).square().mean()


# --- what is trained ------------------------------------------------------------------------------


def test_frozen_embedding() -> None:
    model = nn.Sequential(nn.Embedding(23, 16).requires_grad_(False), models.Stack(2))
    words = torch.randint(0, 23, (4, 12))
    check_against_eager(model, words, lambda m, step: (None, m((words + step) % 23).sum()))
    assert model[0].weight.grad is None


def test_adapters_beside_frozen_layers() -> None:
    model = models.Stack().requires_grad_(False)
    for layer in model.layers:
        layer[0], layer[3] = models.Adapted(layer[0]), models.Adapted(layer[3])
    check_against_eager(model, X, mean_square)
    assert len(gradients_of(model)) == 16
    assert all(value.abs().sum() > 0 for name, value in gradients_of(model).items() if "up" in name)


def test_tied_weights() -> None:
    words = torch.randint(0, 23, (4, 12))

    def loss_of(module: nn.Module, step: int) -> tuple[Any, Tensor]:
        output = module(words=words, labels=(words + step) % 23)
        return output, output["loss"]

    check_against_eager(models.TiedLanguageModel(), {"words": words, "labels": words}, loss_of)


def test_unused_parameters_keep_no_gradient() -> None:
    model = models.Stack()
    model.unused = nn.Linear(3, 3)
    check_against_eager(model, X, mean_square)
    assert model.unused.weight.grad is None


def test_parameters_of_the_same_gradient_do_not_share_it() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(64, 16)), nn.Parameter(torch.randn(64, 16))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.a + self.b

    for gradients in ("accumulated", "returned"):
        model = Sum()
        given = torch.ones(64, 16)
        RockmateModule(model, X, 1.0, gradients=gradients)(X).backward(given)
        model.a.grad.zero_()
        assert (model.b.grad == 1).all()
        assert (given == 1).all()


def test_gradients_to_inputs_and_parameters_together() -> None:
    @made_of(lambda: {"body": models.Stack(2)})
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
            h = self.body(x * y) * scale
            return h if mask is None else h.masked_fill(mask, 0.5)

    mask = torch.rand(64, 16) > 0.5
    for given in (None, mask):
        inputs = [X.clone().requires_grad_(True), X.flip(0).clone()]
        model = Two()
        reference = copy.deepcopy(model)
        torch.manual_seed(1)
        reference(inputs[0], inputs[1], 2.0, given).square().mean().backward()
        expected = inputs[0].grad.clone()
        for module in modules_of(model, (*inputs, 2.0, given)):
            inputs[0].grad = None
            model.zero_grad()
            torch.manual_seed(1)
            module(*inputs, 2.0, given).square().mean().backward()
            assert same_bits(inputs[0].grad, expected)
            assert inputs[1].grad is None
            assert not differing(gradients_of(model), gradients_of(reference))


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [X, (X,), [X], {"x": X}])
def test_forms_of_a_sample(sample: Any) -> None:
    model = models.Stack(dropout=0.0)
    module = RockmateModule(model, sample, 1.0)
    output = module(x=X) if isinstance(sample, dict) else module(X)
    assert same_bits(output, model(X))


def test_an_attribute_of_an_input_is_refused_whenever_it_comes() -> None:
    class Scaling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * getattr(x, "scale", 1.0)

    plain, x = Scaling(4, 4), torch.randn(3, 4)
    module, auto = (
        RockmateModule(copy.deepcopy(plain), x, 1.0, mode=mode) for mode in ("plan", "auto")
    )
    for _ in range(2):
        assert torch.equal(module(x), plain(x))
        auto(x).sum().backward()
    x.scale = 3.0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UnsupportedModelError, match="attribute of its own, scale"):
        module(x)
    assert torch.equal(auto(x), plain(x))


def test_an_attribute_of_an_output_is_refused() -> None:
    class Tagging(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y: Any = super().forward(x)
            y.size_of = y.square().mean()
            return y

    with pytest.raises(UnsupportedModelError, match="attribute of its own, size_of"):
        RockmateModule(Tagging(4, 4), torch.randn(3, 4), 1.0)


def test_none_and_absent_are_alike_where_none_is_the_default() -> None:
    words = torch.randint(0, 23, (4, 12))
    model = models.TiedLanguageModel()
    module = RockmateModule(model, {"words": words, "labels": None}, 1.0, replan=False)
    assert list(module(words=words)) == ["logits"]
    assert list(module(words=words, labels=None)) == ["logits"]
    with pytest.raises(SignatureMismatchError):
        module(words=words, labels=words)


def test_none_for_a_keyword_with_another_default_is_not_absence() -> None:
    @made_of(lambda: {"linear": nn.Linear(16, 16)})
    class Choosing(nn.Module):
        def forward(self, x: Tensor, activation: str | None = "gelu") -> Tensor:
            h = self.linear(x)
            return functional.gelu(h) if activation == "gelu" else h

    model = Choosing()
    module = RockmateModule(model, {"x": X}, 1.0)
    assert same_bits(module(x=X, activation=None), model(X, activation=None))


def test_nested_inputs() -> None:
    @made_of(lambda: {"body": models.Stack(2)})
    class Nested(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], *, extra: dict[str, Any]) -> Tensor:
            return self.body(pair[0] + pair[1]) * extra["weights"][0] + extra["shift"]

    extra = {"weights": [X, None], "shift": 3}

    def loss_of(module: nn.Module, step: int) -> tuple[None, Tensor]:
        return None, module(pair=(X * step, X), extra=extra).square().mean()

    check_against_eager(Nested(), {"pair": (X, X), "extra": extra}, loss_of)


def test_input_that_the_model_changes_in_place() -> None:
    @made_of(lambda: {"body": models.Stack(2)})
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return self.body(x)

    model = Changing()
    given = X.clone()
    modules = modules_of(model, given)
    assert same_bits(given, X)

    def run(callee: nn.Module) -> None:
        given = X.clone()
        torch.manual_seed(1)
        callee(given).sum().backward()
        assert same_bits(given, X * 2)

    eager = copy.deepcopy(model)
    for module in modules:
        same_gradients(module, eager, run)


# --- outputs --------------------------------------------------------------------------------------


Pair = collections.namedtuple("Pair", ["loss", "logits"])


@dataclass(frozen=True)
class Frozen:
    loss: Tensor
    inner: models.PlainOutput


OUTPUTS: dict[str, Callable[..., Any]] = {
    "tuple": lambda loss, y, h, x: (loss, y),
    "list": lambda loss, y, h, x: [loss, y],
    "dict": lambda loss, y, h, x: {"loss": loss, "logits": y},
    "named tuple": lambda loss, y, h, x: Pair(loss, y),
    "dataclass": lambda loss, y, h, x: models.PlainOutput(loss, y, (h, y), "a note"),
    "nested dataclass": lambda loss, y, h, x: Frozen(loss, models.PlainOutput(loss * 2, y)),
    "model output": lambda loss, y, h, x: CausalLMOutput(loss=loss, logits=y),
    "model output with nested": lambda loss, y, h, x: CausalLMOutput(
        loss=loss, logits=y, hidden_states=(h, y)
    ),
    "the input": lambda loss, y, h, x: {"loss": loss, "x": x},
    "view of the input": lambda loss, y, h, x: {"loss": loss, "x": x[1:].t()},
    "views": lambda loss, y, h, x: {"loss": loss, "part": h[2:, :3], "whole": h.view(-1)},
    "the same twice": lambda loss, y, h, x: {"loss": loss, "a": y, "b": y},
    "constants": lambda loss, y, h, x: {"loss": loss, "n": 3, "none": None, "size": y.shape},
    "detached": lambda loss, y, h, x: {"loss": loss, "logits": y.detach(), "name": "x"},
    "integers": lambda loss, y, h, x: {"loss": loss, "best": y.argmax(-1), "sign": y > 0},
    "nested": lambda loss, y, h, x: {"loss": loss, "deep": [{"a": (y, None, 2.5)}, []]},
    "made": lambda loss, y, h, x: {"loss": loss, "ones": torch.ones(3), "n": torch.tensor(7)},
}


def loss_in(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["loss"]
    return output.loss if hasattr(output, "loss") else output[0]


@pytest.mark.parametrize("kind", OUTPUTS)
def test_forms_of_an_output(kind: str) -> None:
    model = models.WithOutput(OUTPUTS[kind])

    def loss_of(module: nn.Module, step: int) -> tuple[Any, Tensor]:
        output = module(X * step)
        return output, loss_in(output)

    module = check_against_eager(model, X, loss_of, num_steps=2, regimes=["minimum"])
    ours, theirs = module(X), model(X)
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        others = {key: value for key, value in theirs.items() if not tensors_of(value)}
        assert repr({key: ours[key] for key in others}) == repr(others)  # a Size is no tuple
    if kind == "dataclass":
        assert ours.note == "a note"
    if kind in ("model output", "named tuple", "dataclass"):
        assert ours.logits.shape == (64, 16)


def test_output_that_is_an_input_with_gradient_is_refused() -> None:
    model = models.WithOutput(lambda loss, logits, hidden, x: (logits, x))
    with pytest.raises(UnsupportedModelError, match="copy"):
        Planner(model, X.clone().requires_grad_(True))


def test_a_loss_of_other_outputs_is_refused_unless_they_are_differentiable() -> None:
    case = planned("gpt2")
    batch = case.workload.make_batch(1)
    module, model = case.module("binding"), case.workload.model
    model.zero_grad()
    reference = copy.deepcopy(model)
    output = module(**batch)
    assert output.logits.requires_grad  # as in eager
    with pytest.raises(
        BackwardError, match=r"shape \(.*\) beside the model's own loss.* differentiable=\"all\""
    ):
        (output.loss + output.logits.square().mean()).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    for run in (reference, module):
        torch.manual_seed(3)
        output = run(**batch)
        (output.loss + 0.0 * output.logits.sum()).backward()  # zeros leave nothing out
    assert_gradients_alike(model, reference)
    logits = module(**batch).logits
    logits.div_(2)  # in place, as in eager


USED: dict[str, Callable[[Any], Tensor]] = {
    "both": lambda output: output.loss + output.logits.square().mean(),
    "loss": lambda output: output.loss,
    "logits": lambda output: output.logits.square().mean(),
}


@pytest.mark.parametrize("used", USED)
def test_every_output_differentiable(used: str) -> None:
    case = planned("gpt2")

    def loss_of(module: nn.Module, step: int) -> tuple[Any, Tensor]:
        output = module(**case.workload.make_batch(step))
        return output, USED[used](output)

    sample = case.workload.sample
    check_against_eager(case.eager(), sample, loss_of, num_steps=1, differentiable="all")


@pytest.mark.parametrize("has_sample", [False, True])
@pytest.mark.parametrize("used", USED)
def test_auto_has_gradients_for_the_outputs_of_which_the_first_loss_is_made(
    used: str, has_sample: bool
) -> None:
    case = planned("gpt2")
    model, eager = case.eager(), case.eager()
    module = RockmateModule(
        model, case.workload.sample if has_sample else None, 0.9, mode="auto", numerics="bitwise"
    )

    def loss_of(callee: nn.Module, seed: int) -> tuple[None, Tensor]:
        return None, USED[used](callee(**case.workload.make_batch(seed)))

    assert_same_steps(train(module, model, loss_of, 3), train(eager, eager, loss_of, 3))
    assert module.frames is None
    assert (module.plan.options.differentiable == "loss") == (used == "loss")


SCRIPT = """
import models, torch
from rockmate import RockmateModule
from their_losses import loss_in

made = models.WithOutput(lambda loss, y, h, x: dict(zip(("loss", "ro" + "ws"), (loss, y))))
module = RockmateModule(made, None, 1.0, mode="auto")
loss_in(module(torch.randn(64, 16))).backward()
"""


@pytest.mark.integration
def test_auto_has_gradients_for_outputs_that_another_file_of_the_script_names(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    loss = "def loss_in(output):\n    return output['loss'] + output['rows'].mean()\n"
    (tmp_path / "their_losses.py").write_text(loss)
    paths = os.pathsep.join(sys.path)
    script = [sys.executable, str(tmp_path / "script.py")]
    subprocess.run(script, check=True, env=os.environ | {"PYTHONPATH": paths})


def test_no_loss_in_the_output_means_all_are_differentiable() -> None:
    model = models.WithOutput(lambda loss, logits, hidden, x: (logits, hidden))

    def loss_of(module: nn.Module, step: int) -> tuple[Any, Tensor]:
        logits, hidden = module(X * step)
        return None, logits.sum() + hidden.square().sum()

    check_against_eager(model, X, loss_of)


def test_part_of_the_outputs_unused() -> None:
    model = models.WithOutput(lambda loss, logits, hidden, x: (logits, hidden))
    check_against_eager(model, X, lambda module, step: (None, module(X * step)[0].sum()))
    check_against_eager(model, X, lambda module, step: (None, module(X * step)[1].sum()))


@pytest.mark.parametrize("regime", REGIMES)
def test_loss_only(regime: str) -> None:
    case = planned("gpt2")
    model, eager = case.eager(), case.eager()
    planner = Planner(model, case.workload.sample, outputs="loss")
    module = planner.module(budget_for(planner, regime))
    assert module(**case.workload.make_batch(1)).logits is None
    assert planner.minimum_peak_bytes <= case.planner.minimum_peak_bytes

    def loss_of(callee: nn.Module, seed: int) -> tuple[None, Tensor]:
        return None, callee(**case.workload.make_batch(seed)).loss

    assert_same_steps(train(module, model, loss_of, 2), train(eager, eager, loss_of, 2))


# --- gradients returned ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "hf-resnet", "mlp"])
def test_returned_gradients_serve_autograd_grad_and_backward(name: str) -> None:
    case = planned(name)
    model, eager = case.eager(), case.eager()
    batch = case.workload.make_batch(1)
    torch.manual_seed(1)
    _, loss = case.workload.loss(eager, batch)
    expected = torch.autograd.grad(loss, list(eager.parameters()))
    planner = Planner(model, case.workload.sample, gradients="returned")
    for regime in REGIMES:
        module = planner.module(budget_for(planner, regime))
        torch.manual_seed(1)
        _, loss = case.workload.loss(module, batch)
        found = torch.autograd.grad(loss, list(model.parameters()))
        assert_alike(found, expected)
        assert all(parameter.grad is None for parameter in model.parameters())
        torch.manual_seed(1)
        _, loss = case.workload.loss(module, batch)
        loss.backward()
        assert_alike([each.grad for each in model.parameters()], expected)
        model.zero_grad()


def test_matrices_in_other_strides_than_the_samples_are_multiplied_as_they_are() -> None:
    """A copy in the sample's strides would round otherwise in double precision."""
    torch.manual_seed(0)
    model = nn.Sequential(*mlp(16, 64, nn.Tanh()), nn.LayerNorm(16)).double()
    plain, x = copy.deepcopy(model), torch.randn(16, 48).double().t()
    module = RockmateModule(model, torch.randn(48, 16).double(), 1.0, numerics="bitwise")
    same_gradients(module, plain, lambda each: each(x).square().mean().backward())


def test_an_input_and_an_output_gradient_in_other_strides_than_planned() -> None:
    @made_of(lambda: {"linear": nn.Linear(16, 16)})
    class Reshaping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.reshape(-1, 16)).tanh().view(x.shape)

    plain, x, weights = Reshaping(), torch.randn(12, 8, 16).transpose(0, 1), torch.randn(12, 8, 16)
    module = RockmateModule(copy.deepcopy(plain), torch.randn(8, 12, 16), 1.0, numerics="bitwise")
    same_gradients(module, plain, lambda each: (each(x).transpose(0, 1) * weights).sum().backward())


def test_copies_of_inputs_in_other_strides_are_within_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @made_of(lambda: {"linear": nn.Linear(64, 64)})
    class Remembering(nn.Module):
        def forward(self, x: Tensor, past: Tensor) -> Tensor:
            return self.linear(torch.cat([past, x], 1)).exp().sin().square().mean()

    x, views = torch.randn(8, 16, 64), torch.randn(8, 32, 64)[:, -16:]
    module = RockmateModule(Remembering(), (x, x), 1.0)
    budget_bytes = module.plan.budget_bytes
    module(x, views).backward()
    assert timeline(lambda: module(x, views).backward()).peak_bytes <= budget_bytes
    monkeypatch.setattr(Evidence, "take_excess", lambda _: 512)  # beside the copies
    module(x, views).backward()
    assert module.plan.budget_bytes == budget_bytes - x.nbytes - 512


@made_of(lambda: {"body": nn.Sequential(*mlp(64, 256, nn.GELU())), "last": nn.Linear(64, 8)})
class Residual(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.body(x))


def test_after_an_input_in_other_strides_those_of_the_sample_are_planned_for() -> None:
    torch.manual_seed(0)
    plain, x = Residual(), torch.randn(128, 64)
    module = RockmateModule(copy.deepcopy(plain), x, 1.0, numerics="bitwise")
    module(x.T.contiguous().T).square().mean().backward()
    module.zero_grad()
    same_gradients(module, plain, lambda each: each(x).square().mean().backward())


def test_a_slice_that_is_read_late_is_read_as_it_lies() -> None:
    """Functions of a contiguous copy round otherwise."""

    @made_of(lambda: {"linear": nn.Linear(16, 9)})
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            both = self.linear(x)
            figure = both[:, :5].sum()
            for _ in range(24):
                figure = figure.sin()
            return figure.detach() + both[:, 5:].sigmoid().square().mean()

    torch.manual_seed(0)
    plain, x = Parts(), torch.randn(36, 16)
    module = RockmateModule(copy.deepcopy(plain), x, 1.0, numerics="bitwise")
    same_gradients(module, plain, lambda each: each(x).backward())


def test_copies_of_gradients_in_other_strides_are_within_the_budget() -> None:
    @made_of(lambda: {"body": nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))})
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).exp().sin().transpose(0, 1)

    x, gradient = torch.randn(8, 16, 64), torch.randn(16, 8, 64)
    module = RockmateModule(Turned(), x, 1.0)
    budget_bytes = module.plan.budget_bytes
    for _ in range(2):
        module(x).backward(gradient)
    assert module.plan.budget_bytes == budget_bytes - gradient.nbytes
    assert timeline(lambda: module(x).backward(gradient)).peak_bytes <= budget_bytes


@pytest.mark.parametrize("is_image", [False, True])
def test_a_tight_plan_takes_rows_that_are_one_and_images_with_channels_last(is_image: bool) -> None:
    plain = models.BatchNormNet() if is_image else models.Stack(dropout=0.0)
    sample = torch.randn(4, 3, 8, 8) if is_image else torch.randn(64, 16)
    other = torch.randn(1, 16).expand(64, 16)
    if is_image:
        other = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    module = RockmateModule(copy.deepcopy(plain), sample, 0.6, on_infeasible="least")
    for each in (module, plain):
        each(other).square().sum().backward()
    assert_gradients_alike(module, plain, rtol=1e-4, atol=1e-5)
