"""Steps with channels last show no layout: code that asks for one, or that takes views of values,
gets what it gets in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rockmate import Plan, Planner, RockmateModule
from rockmate.planning import checked_forms


@pytest.fixture(autouse=True)
def channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form with channels last is taken where there is one."""
    monkeypatch.setattr(checked_forms, "in_one_format", lambda forms: list(forms)[-1:])


class Between(nn.Module):
    """A function of a feature map between two convolutions."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.out = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(self.inner(x).tanh())
        return self.out(y.reshape(len(x), 8, 6, -1)).square().mean()


def image(batch: int = 2, side: int = 8) -> Tensor:
    return torch.randn(batch, 4, side, side, dtype=torch.float64)


def viewed(y: Tensor) -> Tensor:
    return y.view(y.shape[0], -1) * torch.arange(y[0].numel()).to(y).view(1, -1)


def changed_through_view(y: Tensor) -> Tensor:
    z = y * 1
    z.view(2, -1).mul_(torch.arange(288).to(y))
    return z


def changed_behind_view(y: Tensor) -> Tensor:
    z = y * 1
    view = z.view(2, -1)
    z.mul_(2.0)
    return view


def changed_through(maybe_a_copy: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(y: Tensor) -> Tensor:
        z = y * 1
        other = maybe_a_copy(z)
        other.mul_(torch.arange(288).to(y).view(other.shape[1:]))
        return z

    return function


def strided(y: Tensor) -> Tensor:
    return y.as_strided((2, 8, 6, 6), (288, 36, 6, 1)) * torch.arange(6).to(y)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "view": (viewed, True),
    "view as": (lambda y: y.view_as(y.new_empty(2, 288)), True),
    "view of parts": (lambda y: y[:, ::2].tanh().view(2, 4, -1).repeat(1, 2, 1), True),
    "changed through a view": (changed_through_view, False),
    "changed behind a view": (changed_behind_view, False),
    "flattened": (lambda y: y.flatten(1).relu(), True),
    "changed through reshape": (changed_through(lambda z: z.reshape(2, -1)), False),
    "changed through flatten": (changed_through(lambda z: z.flatten(1)), False),
    "changed through contiguous": (changed_through(Tensor.contiguous), False),
    "changed through a module": (changed_through(nn.Flatten()), False),
    "changed through rows": (changed_through(lambda z: torch.reshape(z, (2, 8, 36))), True),
    "as_strided": (strided, False),
    "torch.as_strided": (lambda y: torch.as_strided(y, (2, 288), (288, 1)), False),
    "stride": (lambda y: y * y.stride(1), False),
    "is_contiguous": (lambda y: y * 2 if y.is_contiguous() else y, False),
    "view as another type": (lambda y: torch.view_as_complex(y.unflatten(3, (3, 2))).abs(), False),
    "vmap": (torch.vmap(lambda z: nn.functional.conv2d(z, z.new_ones(8, 1, 1, 1), groups=8)), True),
}


def gradients(callee: nn.Module, owner: nn.Module, x: Tensor) -> list[Tensor]:
    owner.zero_grad()
    loss = callee(x)
    loss.backward()
    return [loss.detach(), *(each.grad for each in owner.parameters() if each.grad is not None)]


def assert_alike(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_code_that_sees_layouts_computes_what_it_computes_in_eager(name: str) -> None:
    torch.manual_seed(0)
    function, has_form = FUNCTIONS[name]
    model, x = Between(function).double(), image()
    eager = copy.deepcopy(model)
    planner = Planner(model, x, kernels="fused")
    plan = planner.plan(planner.minimum_peak_bytes)
    assert (plan.options.memory_format == "channels_last") == has_form
    module = RockmateModule(model, x, plan=plan)
    assert_alike(gradients(module, model, x), gradients(eager, eager, x))


class Maps(nn.Module):
    """Gives away feature maps in several layouts, in its output and in an attribute."""

    def __init__(self, *, gives_views: bool) -> None:
        super().__init__()
        self.inner, self.out = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 6, 1)
        self.last: Any = None
        self.gives_views = gives_views

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.inner(x).tanh()
        z = self.out(y)
        self.last = {"map": z.detach() * 2}
        tokens = z.flatten(2).transpose(1, 2)
        others = [tokens, (z * 2).permute(0, 2, 3, 1)] if self.gives_views else []
        return {"map": y, "others": others, "sum": y.sum((2, 3))}


def used(output: Mapping[str, Any]) -> list[Tensor]:
    """What a script makes of the maps, by views that eager's layouts allow."""
    y = output["map"]
    parts = [y.view(len(y), -1), y.detach().view(-1), output["sum"].view(-1)]
    if output["others"]:
        tokens, last = output["others"]
        parts += [tokens.transpose(1, 2).view(len(y), -1), last.permute(0, 3, 1, 2).view(-1)]
    return parts


def trained_on(callee: nn.Module, owner: Maps, x: Tensor) -> list[Tensor]:
    owner.zero_grad()
    output = callee(x)
    parts = used(output)
    torch.stack([part.square().mean() for part in parts if part.requires_grad]).sum().backward()
    grads = [each.grad for each in owner.parameters() if each.grad is not None]
    left = owner.last["map"]
    return [*grads, left.view(-1), output["map"].detach(), *(each.detach() for each in parts)]


@pytest.mark.parametrize("gives_views", [False, True])
def test_maps_that_a_model_gives_away_are_laid_out_as_in_eager(
    gives_views: bool, tmp_path: Path
) -> None:
    """Contiguous ones are copied; views of others have no such form."""
    torch.manual_seed(0)
    model, x = Maps(gives_views=gives_views).double(), image()
    eager = copy.deepcopy(model)
    module = RockmateModule(model, image(4, 10), 1.0, kernels="fused")
    plan = module.plan
    assert plan.options.memory_format == ("as_given" if gives_views else "channels_last")
    for each in (image(4, 10), x, image(3), image(1)):
        assert_alike(trained_on(module, model, each), trained_on(eager, eager, each))
    plan.save(tmp_path / "plan.json")
    x = image(4, 10)
    loaded = RockmateModule(model, x, plan=Plan.load(tmp_path / "plan.json"))
    assert_alike(trained_on(loaded, model, x), trained_on(eager, eager, x))


def test_gradients_of_inputs_are_laid_out_as_in_eager() -> None:
    torch.manual_seed(0)
    model, x = Between(torch.sin).double(), image().requires_grad_()
    eager = copy.deepcopy(model)
    module = Planner(model, x, kernels="fused").module(1.0)
    assert module.plan.options.memory_format == "channels_last"
    found: list[Tensor] = []
    for callee in (module, eager):
        before = x.detach().clone().requires_grad_()
        inner = before * 2
        inner.register_hook(lambda gradient: found.append(gradient.view(2, -1)))
        callee(inner).backward()
    assert_alike(found[:1], found[1:])


def test_gradients_of_parameters_are_laid_out_as_in_eager_where_code_sees_them() -> None:
    """A hook, or the caller of `torch.autograd.grad`."""
    torch.manual_seed(0)
    model, x = Between(torch.sin).double(), image()
    eager = copy.deepcopy(model)
    module = Planner(model, x, kernels="fused", gradients="returned").module(1.0)
    mine = torch.autograd.grad(module(x), list(model.parameters()))
    assert_alike([*mine], [*torch.autograd.grad(eager(x), list(eager.parameters()))])

    found: list[Tensor] = []
    for each in (model, eager):
        each.inner.weight.register_hook(lambda gradient: found.append(gradient.view(-1)))
    module = Planner(model, x, kernels="fused").module(1.0)
    assert module.plan.options.memory_format == "as_given"
    assert_alike(gradients(module, model, x), gradients(eager, eager, x))
    assert_alike(found[:1], found[1:])


class OfMemory(nn.Module):
    """Scales values by their place in memory."""

    def forward(self, y: Tensor) -> Tensor:
        values = y.detach().numpy().ravel(order="K")
        return y * float(values[: len(values) // 2].sum())


class Flat(torch.autograd.Function):
    """Views gradients, as eager's layouts allow."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return (gradient.view(-1) * 2).view(gradient.shape)


@pytest.mark.parametrize("kind", ["module", "function"])
def test_opaque_code_gets_values_in_eagers_layout(kind: str) -> None:
    torch.manual_seed(0)
    is_module = kind == "module"
    function: Any = nn.Sequential(OfMemory()) if is_module else Flat.apply
    model, x = Between(function).double(), image()
    eager = copy.deepcopy(model)
    untraced = ["function"] if is_module else []
    module = Planner(model, x, kernels="fused", untraced=untraced).module(1.0)
    assert module.plan.options.memory_format == "as_given"
    assert_alike(gradients(module, model, x), gradients(eager, eager, x))
