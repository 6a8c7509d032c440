"""Autograd functions around kernels that no trace can follow, here NumPy's, run as opaque ops."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from made_of import made_of
from torch import Tensor, nn

from rockmate import (
    InvalidSampleError,
    RockmateModule,
    UnsupportedModelError,
    register_opaque,
    timeline,
)
from rockmate.capture import opaque_functions


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    yield
    opaque_functions._callers.clear()
    opaque_functions._modules.clear()


def scaled_tanh(x: Tensor, scale: float) -> Tensor:
    """By a kernel that PyTorch does not see, into PyTorch's memory."""
    y = torch.empty_like(x)
    np.tanh(x.detach().numpy() * np.float32(scale), out=y.numpy())
    return y


def functions() -> tuple[type[torch.autograd.Function], type[torch.autograd.Function]]:
    """A function that runs a foreign kernel and saves a tensor of its own, and one that writes."""

    class ForeignTanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
            y = scaled_tanh(x, scale)
            ctx.save_for_backward(1 - y * y)
            ctx.scale = scale
            return y

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            (slope,) = ctx.saved_tensors
            found = torch.empty_like(slope)
            np.multiply(gradient.numpy(), slope.numpy() * np.float32(ctx.scale), out=found.numpy())
            return found, None

    class Overwriting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            x.detach().numpy()[...] = 0
            return x + 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    return ForeignTanh, Overwriting


class Net(nn.Module):
    """Calls a function three times, as libraries do: by an `apply` that was taken beforehand."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.apply_function = function.apply

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.apply_function(layer(x), 0.5 + index) if index < 3 else layer(x)
        return x.square().mean()


def gradients(module: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    module(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]  # pyright: ignore


@pytest.mark.parametrize("is_named", [True, False])
def test_a_foreign_kernel(is_named: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Found without being named, run twice where memory is short, with eager's bits."""
    function, _ = functions()
    if is_named:
        assert register_opaque(function) is function
    torch.manual_seed(0)
    model, x = Net(function), torch.randn(256, 64)
    expected = gradients(model, model, x)
    for budget in (1.0, 0.01):
        with caplog.at_level(logging.WARNING):
            module = RockmateModule(model, x, budget, on_infeasible="least")
        assert all(map(torch.equal, gradients(module, model, x), expected))
    assert ("ForeignTanh runs as one opaque op" in caplog.text) != is_named
    assert module.plan.predicted_peak_bytes < 0.8 * module.plan.baseline_peak_bytes


def test_what_it_saves_is_counted() -> None:
    function, _ = functions()
    register_opaque(function)
    model, x = Net(function), torch.randn(256, 64)
    module = RockmateModule(model, x, 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        module(x).backward()

    for _ in range(2):
        step()
    measured, predicted = timeline(step).peak_bytes, module.plan.predicted_peak_bytes
    assert abs(measured - predicted) <= 0.01 * predicted
    # Three slopes and the inputs of three layers.
    assert predicted >= 6 * x.nbytes


def test_a_kernel_that_writes_into_its_input_is_refused() -> None:
    _, function = functions()
    register_opaque(function)

    @made_of(lambda: {"layer": nn.Linear(8, 8)})
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function.apply(self.layer(x))

    with pytest.raises(UnsupportedModelError, match=r"Overwriting writes into an input .*clone"):
        RockmateModule(Writes(), torch.randn(4, 8), 1.0)


def test_a_class_of_modules() -> None:
    @register_opaque
    class Halting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            while x.norm() > 1:
                x = torch.tanh(x) / 2
            return x

    model = nn.Sequential(nn.Linear(8, 8), Halting(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    module = RockmateModule(model, x, 1.0)
    assert torch.equal(module(x), model(x))


def test_what_is_no_class_is_refused() -> None:
    with pytest.raises(TypeError, match="register_opaque was given"):
        register_opaque(scaled_tanh)  # pyright: ignore


def test_a_model_without_the_function_is_captured_as_ever() -> None:
    """A registered function changes nothing for others: neither errors nor how often they run."""

    @made_of(lambda: {"linear": nn.Linear(4, 4), "num_calls": 0})
    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counts.append(1)
            return self.linear(x).square().mean()

    counts: list[int] = []
    RockmateModule(Counted(), torch.zeros(2, 4), 1.0)
    num_before = len(counts)
    counts.clear()
    register_opaque(functions()[0])
    RockmateModule(Counted(), torch.zeros(2, 4), 1.0)
    assert len(counts) == num_before
    with pytest.raises(InvalidSampleError, match="reduction dim"):
        RockmateModule(Counted(), torch.zeros(2, 5), 1.0)


class Counting(torch.autograd.Function):
    """A gradient reversal that grows with each backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Any) -> Tensor:
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.owner.count += 1
        return -ctx.owner.count * gradient, None


class CountingInFile(Counting):
    """The same, with its count in the class and a list among the globals of its file."""

    num_runs = 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        CountingInFile.num_runs += 1
        NOTES.append(float(gradient.sum()))
        return -CountingInFile.num_runs * gradient, None


NOTES: list[Any] = []


class Noting(nn.Module):
    """Notes in its backward: by a hook of an activation or module, or by an autograd function."""

    def __init__(self, function: type[Counting] | None, *, is_module_hook: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function, self.count, self.seen = function, 0, None
        self.is_noted = function is None and not is_module_hook
        notes: list[Any] = []
        if is_module_hook:
            self.last.register_full_backward_hook(lambda *given: notes.append(len(given)))
        self.left = lambda: (self.count, self.seen, [*notes], CountingInFile.num_runs, [*NOTES])

    def note(self, gradient: Tensor) -> None:
        self.seen = gradient.shape

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.function is not None:
            h = self.function.apply(h, self)
        elif self.is_noted and h.requires_grad:
            h.register_hook(self.note)
        return self.last(h).square().mean()


@pytest.mark.parametrize("where", ["seen of a Noting", "content of a list", "attribute", "file"])
def test_what_a_backward_leaves_behind(where: str) -> None:
    function = {"attribute": Counting, "file": CountingInFile}.get(where)
    outcomes, x = [], torch.randn(4, 8)
    for mode in (None, "auto" if function is None else "plan"):
        torch.manual_seed(0)
        model = Noting(function, is_module_hook="list" in where)
        before = model.left()
        if mode and function is None:
            with pytest.raises(UnsupportedModelError, match=f"backward changes (the )?{where}"):
                RockmateModule(model, x, budget=1.0)
            assert model.left() == before
        step = RockmateModule(model, x, budget=1.0, mode=mode) if mode else model
        outcomes.append([(gradients(step, model, x), model.left()) for _ in range(3)])
        CountingInFile.num_runs = 0
        NOTES.clear()
    for (expected, left), (found, ours) in zip(*outcomes, strict=True):
        assert all(map(torch.equal, expected, found))
        assert left == ours
