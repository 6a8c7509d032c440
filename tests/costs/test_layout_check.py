"""Calls are run and their layouts compared wherever a step is captured, however it is then run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_trains_alike
from made_of import made_of
from torch import Tensor, nn
from torch.nn import functional

from rockmate import Planner, RockmateModule
from rockmate.capture.roles import Drawn
from rockmate.costs.layout_check import _synthetic
from rockmate.errors import KernelLayoutError
from rockmate.ops import kernel_layouts

PLAIN = torch.contiguous_format


@pytest.fixture(autouse=True)
def nothing_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(kernel_layouts, "_observed", {})
    monkeypatch.setattr(kernel_layouts, "_corrected", {})


@pytest.fixture
def swap() -> Iterator[Any]:
    """An op whose result is transposed in memory, and whose fake result is not."""
    with torch.library._scoped_library("rockmate_layouts", "FRAGMENT") as library:
        library.define("swap(Tensor x) -> Tensor")
        library.impl("swap", lambda x: (x * 2).mT.contiguous().mT, "CompositeExplicitAutograd")
        fake = torch.library.register_fake("rockmate_layouts::swap", lib=library)
        fake(lambda x: torch.empty_like(x, memory_format=PLAIN))
        torch.library.register_autograd(
            "rockmate_layouts::swap",
            lambda _, gradient: torch.ops.rockmate_layouts.swap(gradient),
            lib=library,
        )
        yield torch.ops.rockmate_layouts.swap


@made_of(lambda swap: {"swap": swap, "first": nn.Linear(8, 8), "last": nn.Linear(8, 8)})
class Swapped(nn.Module):
    """Goes another way for another layout, as code of PyTorch does."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.swap(self.first(x))
        y = y.view(-1) if y.is_contiguous() else y.mT.reshape(-1).exp()
        return self.last(functional.dropout(y.view(-1, 8), 0.5)).square().sum()


def same_steps(module: RockmateModule, eager: nn.Module, *batches: Tensor) -> None:
    """A step for each batch, whose output is the loss."""
    assert_trains_alike(module, eager, lambda callee, step: callee(batches[step]), len(batches))


def test_a_plan_that_is_given_to_another_process(swap: Any) -> None:
    model, x = Swapped(swap), torch.randn(4, 6, 8)
    eager = copy.deepcopy(model)
    plan = Planner(model, x, numerics="bitwise").plan(1.0)
    kernel_layouts._observed.clear()
    kernel_layouts._corrected.clear()
    same_steps(RockmateModule(model, x, plan=plan), eager, x)


def test_calls_of_other_sizes(swap: Any) -> None:
    model, x = Swapped(swap), torch.randn(4, 6, 8)
    eager = copy.deepcopy(model)
    module = RockmateModule(model, x, 1 << 20, numerics="bitwise")
    batches = [torch.randn(*sizes, 8) for sizes in ((4, 6), (3, 6), (3, 5), (2, 4), (5, 7), (1, 6))]
    same_steps(module, eager, *batches)


def test_one_that_a_second_capture_does_not_correct_is_refused(
    swap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_layouts, "_laid_out", lambda _, fake: fake)
    with pytest.raises(KernelLayoutError, match=r"swap.*register_fake.*untraced"):
        RockmateModule(Swapped(swap), torch.randn(4, 6, 8), 1.0)


class Pooled(nn.Module):
    """The pooled branch of DeepLabV3+: its map is one pixel, whose strides tell the format."""

    def __init__(self, *, is_viewed: bool) -> None:
        super().__init__()
        self.stem, self.is_viewed = nn.Conv2d(3, 8, 3, padding=1), is_viewed
        self.branch = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.dropout, self.head = nn.Dropout(0.5), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        pooled = functional.interpolate(self.branch(x), size=x.shape[-2:], mode="bilinear")
        if self.is_viewed:
            is_last = pooled.is_contiguous(memory_format=torch.channels_last)
            rows = pooled.permute(0, 2, 3, 1) if is_last else pooled
            return rows.view(len(rows), -1).square().sum()
        both = self.dropout(torch.cat([x, self.dropout(pooled)], 1))
        return self.head(both).square().mean()


@pytest.mark.parametrize("is_viewed", [False, True])
def test_a_pooled_branch_in_channels_last(is_viewed: bool) -> None:
    model: Any = Pooled(is_viewed=is_viewed)
    if is_viewed:
        model.head.requires_grad_(requires_grad=False)
    in_channels_last(model, torch.randn(2, 3, 8, 8))


def in_channels_last(model: nn.Module, x: Tensor) -> None:
    """Steps of a model and an image in that format are eager's."""
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    x, eager = x.to(memory_format=torch.channels_last), copy.deepcopy(model)
    same_steps(RockmateModule(model, x, 1.0, numerics="bitwise"), eager, x)


class Images(nn.Module):
    """Norms of channels-last maps, also of one pixel, behind which memory orders count."""

    def __init__(self, norm: nn.Module, *, pooled: bool) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), norm
        self.dropout, self.head = nn.Dropout(0.5), nn.Conv2d(8, 4, 1)
        self.pooled = pooled

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = functional.adaptive_avg_pool2d(x, 1) if self.pooled else x
        x = self.head(self.dropout(functional.relu(self.norm(x))))
        return x.reshape(len(x), -1).square().mean()


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.GroupNorm(4, 8)])
def test_norms_of_channels_last_maps(norm: nn.Module, pooled: bool) -> None:
    in_channels_last(Images(norm, pooled=pooled), torch.randn(4, 3, 6, 6))


def test_norms_and_pointwise_ops_of_channels_last_maps() -> None:
    class Loss(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x).transpose(1, 2)
            return functional.log_softmax(scores, -1)[..., 0].mean()

    layers = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Hardswish(), nn.Conv2d(8, 4, 1)
    in_channels_last(Loss(*layers, nn.Flatten(2)), torch.randn(4, 3, 6, 6))


def test_an_op_that_returns_its_argument_is_refused() -> None:
    with torch.library._scoped_library("rockmate_layouts", "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: x, "CompositeExplicitAutograd")
        fake = torch.library.register_fake("rockmate_layouts::same", lib=library)
        fake(torch.empty_like)
        torch.library.register_autograd(
            "rockmate_layouts::same", lambda _, gradient: gradient, lib=library
        )

        @made_of(lambda: {"layer": nn.Linear(8, 8)})
        class Same(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.ops.rockmate_layouts.same(self.layer(x)).square().sum()

        with pytest.raises(KernelLayoutError, match=r"same.*in the memory of an argument"):
            Planner(Same(), torch.randn(4, 8))


def test_a_call_that_a_pass_replaces_is_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A dropout is split before it is measured. Its fake result is laid out otherwise here."""
    from rockmate.capture import joint

    laid_out = joint.in_kernel_layout

    def lying(target: Any, args: Any, kwargs: Any, result: Any) -> Any:
        key = kernel_layouts.call_key(target, args, kwargs)
        is_known = key in kernel_layouts._corrected
        if target is torch.ops.aten.native_dropout.default and not is_known:
            return tuple(each.new_empty(each.t().shape).t() for each in result)
        return laid_out(target, args, kwargs, result)

    monkeypatch.setattr(joint, "in_kernel_layout", lying)

    class Loss(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().sum()

    loss = Loss(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    eager, x = copy.deepcopy(loss), torch.randn(4, 8)
    with caplog.at_level("INFO", "rockmate.costs.layout_check"):
        module = RockmateModule(loss, x, 1.0, numerics="bitwise")
    assert "native_dropout" in caplog.text
    same_steps(module, eager, x)


def test_a_drawn_seed_is_what_its_op_returns() -> None:
    # A kernel of attention reads it where that op puts it, which fake tensors do not tell.
    drawn = Drawn(torch.ops.aten.sort.default, (torch.empty(3), 0), {}, 1)
    ((values,), kept) = _synthetic(((drawn,), {"other": [torch.empty(2), None]}))
    assert values.tolist() == [0, 1, 2]
    assert kept["other"][0].tolist() == [0.5, 0.5]
    assert kept["other"][1] is None
