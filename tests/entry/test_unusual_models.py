"""Models of unusual parts: planned as eager's, or refused with advice that works."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same, one_step, train
from made_of import made_of
from torch import Tensor, nn

from rockmate import InvalidSampleError, Planner, RockmateModule, UnsupportedModelError

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


@made_of(lambda: {"body": nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))})
class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@made_of(lambda: {"blocks": nn.ModuleList(Block() for _ in range(3))})
class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@made_of(lambda: {"norm": nn.GroupNorm(4, 16)})
class GroupNormOnInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class SparseBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(3).to_sparse())


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * (2 if scale.item() > 5 else 1) * scale


@made_of(lambda: {"scale": nn.Parameter(torch.tensor(1.5)), "scaled": Scaled()})
class ScaledByScalar(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(super().forward(x), self.scale * 2)


def same_steps(module: Any, plain: nn.Module, call: Callable[[Any, int], Tensor]) -> None:
    """Three steps of mean squares, bit for bit."""

    def loss(each: Any, step: int) -> tuple[Tensor, Tensor]:
        output = call(each, step)
        return output, output.square().mean()

    for step in range(3):
        pairs = ((module, module.original), (plain, plain))
        assert_same(*(one_step(each, owner, loss, step) for each, owner in pairs))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (GroupNormOnInput, {}),
        (SparseBuffer, {}),
        (ScaledByScalar, {"untraced": ["scaled"]}),
    ],
)
def test_bit_for_bit(make: type[Net], options: dict[str, Any]) -> None:
    model = make()
    plain = copy.deepcopy(model)
    module = RockmateModule(model, X, 0.9, on_infeasible="least", numerics="bitwise", **options)
    same_steps(module, plain, lambda each, step: each(X[: 64 - step]))


@pytest.mark.parametrize("sample", [None, X])
@pytest.mark.parametrize("mode", ["plan", "auto", "frames"])
def test_lazy_modules_are_planned_after_the_call_that_makes_them(
    mode: Any, sample: Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rockmate")

    def made() -> nn.Module:
        first = nn.Sequential(nn.Sequential(nn.LazyLinear(16), nn.Dropout(0.1)), nn.Tanh())
        return nn.Sequential(first, Net(), nn.LazyBatchNorm1d())

    model = made()
    plain = made()
    plain.load_state_dict(model.state_dict())
    options = {} if mode == "frames" else {"numerics": "bitwise"}
    module = RockmateModule(model, sample, 0.9, on_infeasible="least", mode=mode, **options)
    same_steps(module, plain, lambda each, _: each(X))
    assert module.is_planned == (mode != "frames")
    assert sum("lazy modules" in each for each in caplog.messages) == 1


def test_lazy_modules_that_have_not_run_are_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(16), Net())
    with pytest.raises(InvalidSampleError, match=r"0\.weight belongs to a lazy module"):
        Planner(model, X)


@made_of(lambda inner: {"inner": inner})
class Around(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_is_refused_and_runs_within_what_is_untraced() -> None:
    inner = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())
    model = nn.Sequential(Net(), Around(torch.jit.script(inner)), Net())
    with pytest.raises(UnsupportedModelError, match=r"1\.inner is compiled by torch\.jit"):
        RockmateModule(model, X, 0.9)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def loss_of(callee: Any, _: int) -> tuple[Tensor, Tensor]:
        output = callee(X)
        return output, output.square().mean()

    def steps(callee: Any) -> list[Any]:
        model.load_state_dict(start)
        return train(callee, model, loss_of)

    for _ in range(2):  # its first runs are compiled otherwise than later ones
        theirs = steps(model)
    for options in ({"untraced": ["1"]}, {"mode": "frames"}):
        module = RockmateModule(model, X, 0.9, on_infeasible="least", **options)
        for mine, eager in zip(steps(module), theirs, strict=True):
            assert_same(mine, eager)


def test_sizes_that_coincide_in_the_sample_and_not_in_a_later_call() -> None:
    @made_of(lambda: {"inp": nn.Linear(3, 16), "net": Net()})
    class Points(nn.Module):
        def forward(self, x: Tensor, ptr: Tensor) -> Tensor:
            return self.net(self.inp(x)) * (ptr.numel() - 1)

    model, ptr = Points(), torch.tensor([0, 3, 6])
    plain = copy.deepcopy(model)
    module = RockmateModule(model, budget=0.9, on_infeasible="least", numerics="bitwise")
    same_steps(module, plain, lambda each, step: each(X[: 40 - 6 * step, :3], ptr))
