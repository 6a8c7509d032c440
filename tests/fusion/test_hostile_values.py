"""Kernels give eager's numbers for values, dtypes and layouts that a compiler treats otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from made_of import made_of
from torch import Tensor, fx, nn
from torch.nn import functional

from bench.measure import allocator_peak
from rockmate import Planner
from rockmate._torch.inductor import CompilationError, decomposed
from rockmate.fusion.kernels import writing


@made_of(lambda function: {"function": function, "scale": nn.Parameter(torch.ones(32, 64))})
class Applied(nn.Module):
    """A function of scaled values, with pointwise ops around it."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.function(x * self.scale, *others) * 2.0


@pytest.fixture(autouse=True)
def equal_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel that is right is taken."""
    monkeypatch.setattr("rockmate.fusion.kernels._COMPILED", {})
    monkeypatch.setattr("rockmate.fusion.kernels.time_ms", lambda *_: 1.0)


def assert_same(function: Callable[..., Tensor], *sample: Tensor, rtol: float = 1e-5) -> None:
    """A fused step gives each element of the result and of the gradient as eager does."""
    model = Applied(function)
    eager = copy.deepcopy(model)
    planner = Planner(model, sample, kernels="fused")
    module = planner.module(planner.minimum_peak_bytes)
    results = []
    for callee, owner in ((module, model), (eager, eager)):
        result = callee(*sample)
        result.backward(torch.ones_like(result))
        results.append((result.detach(), owner.scale.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=0.0, equal_nan=True)


@pytest.mark.parametrize(
    "function", [torch.expm1, torch.atanh, torch.erf, torch.sinc, functional.elu, functional.celu]
)
def test_small_numbers_keep_their_digits(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.logspace(-9, -3, 2048).view(32, 64)
    assert_same(function, torch.where(torch.arange(64) % 2 == 0, x, -x), rtol=1e-3)


def test_large_numbers_do_not_overflow() -> None:
    assert_same(torch.acosh, torch.logspace(1, 30, 2048).view(32, 64))


@pytest.mark.parametrize("mode", ["floor", "trunc", "remainder", "fmod"])
def test_quotients_jump_where_eagers_do(mode: str) -> None:
    def divided(x: Tensor, y: Tensor) -> Tensor:
        if mode in ("floor", "trunc"):
            return torch.div(x, y, rounding_mode=mode) + x
        return getattr(torch, mode)(x, y)

    steps = torch.arange(2048).view(32, 64) % 37
    assert_same(divided, steps * 0.1, torch.full((32, 64), 0.1))


@pytest.mark.parametrize("mode", ["floor", "trunc", "remainder", "fmod"])
def test_integers_are_divided_outside_of_kernels(mode: str) -> None:
    """A compiled division by zero ends the process, or raises while a kernel is checked."""

    def divided(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if mode in ("floor", "trunc"):
            return x.exp() * torch.div(i * 3, j, rounding_mode=mode)
        return x.exp() * getattr(torch, mode)(i * 3, j)

    i, j = torch.randint(-9, 9, (32, 64)), torch.randint(1, 9, (32, 64))
    assert_same(divided, torch.randn(32, 64), i, j)


@made_of(lambda loss: {"loss": loss, "layers": nn.ModuleList(nn.Linear(64, 64) for _ in range(3))})
class Reduced(nn.Module):
    """Losses inside of a model, each in memory as large as what it reduces."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second, last = self.layers
        x = first(x)
        x = second(torch.tanh(x * 2 + self.loss(x.sigmoid(), y)))
        return last(torch.tanh(x * 2 + self.loss(x.sigmoid(), y))).square().mean()


@pytest.mark.parametrize(
    "loss",
    [
        functional.mse_loss,
        functional.smooth_l1_loss,
        functional.soft_margin_loss,
        functional.binary_cross_entropy,
    ],
)
def test_memory_of_losses_is_released(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, sample = Reduced(loss).train(), (torch.randn(256, 64), torch.rand(256, 64))
    planner = Planner(model, sample, kernels="fused")
    module = planner.module(planner.minimum_peak_bytes)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        module(*sample).backward()

    step()
    assert allocator_peak(step) <= module.plan.predicted_peak_bytes


def test_a_result_that_has_no_view_like_the_operand_has_no_form_in_place() -> None:
    graph = fx.Graph()
    graph.placeholder("target")
    values = graph.placeholder("values")
    result = graph.call_function(torch.ops.aten.mul.Tensor, (values, 2.0))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (result, 1.0)),))
    shape, steps = (4, 8, 6, 6), (288, 1, 48, 8)
    cpu = torch.device("cpu")
    layouts = [((1, 32, 6, 6), (1152, 36, 6, 1), torch.float32, cpu)]
    layouts.append((shape, steps, torch.float32, cpu))
    traced, _ = decomposed(fx.GraphModule(nn.Module(), graph), layouts)
    with pytest.raises(CompilationError, match="strides"):
        writing(traced, 0)
