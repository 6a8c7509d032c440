"""Each op of a captured step lays its results out as the capture says.

A view that was captured for one layout reads other elements in another.
"""

from __future__ import annotations

import copy
from typing import Any

import architectures
import layouts
import pytest
import torch
from helpers import same_gradients
from made_of import made_of
from torch import nn
from torch.nn import functional

from rockmate import Planner, RockmateModule
from rockmate.errors import UnsupportedModelError
from rockmate.ops.kernels import as_strided
from rockmate.planning.step import capture_step, checked_step


@made_of(lambda *, channels_last: {"layer": nn.Linear(8, 16), "channels_last": channels_last})
class Transposed(nn.Module):
    """Dropout whose gradient comes transposed, as that of attention in windows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).softmax(-1).unflatten(-1, (4, 4))
        if self.channels_last:
            y = y.contiguous(memory_format=torch.channels_last)
        y = nn.functional.dropout(y, 0.3, self.training)
        return y.transpose(0, 1).reshape(6, 4, 16).square().sum()


def other_layouts(model: nn.Module, sample: Any) -> list[str]:
    """Ops whose results have another layout than the capture says."""
    return layouts.other_layouts(checked_step(lambda: capture_step(model, sample)))


@pytest.mark.parametrize("channels_last", [False, True])
def test_dropout_of_a_transposed_gradient(channels_last: bool) -> None:
    torch.manual_seed(0)
    model, x = Transposed(channels_last=channels_last), torch.randn(4, 6, 8)
    plain = copy.deepcopy(model)
    assert not other_layouts(model, x)
    module = RockmateModule(model, x, budget=1.0)
    same_gradients(module, plain, lambda run: (torch.manual_seed(1), run(x).backward()))


@made_of(lambda function: {"first": nn.Conv2d(3, 8, 3), "function": function})
class Mixed(nn.Module):
    """A function of values in channels-last, whose gradient is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.function(self.first(x).contiguous(memory_format=torch.channels_last))
        return (y.contiguous() ** 2).sum()


@pytest.mark.parametrize(
    "function",
    [
        nn.ELU(),
        nn.Hardsigmoid(),
        nn.Hardswish(),
        nn.Hardtanh(),
        nn.Softplus(),
        nn.BatchNorm2d(8),
        nn.GroupNorm(2, 8),
    ],
    ids=lambda function: type(function).__name__,
)
def test_gradients_in_another_memory_format_than_the_values(function: nn.Module) -> None:
    assert not other_layouts(Mixed(function).train(), torch.randn(2, 3, 6, 6))


PADS = [
    nn.ReflectionPad2d(1),
    nn.ReplicationPad2d(1),
    nn.ReflectionPad3d(1),
    nn.ReplicationPad3d(1),
]


@pytest.mark.parametrize("pad", PADS, ids=lambda pad: type(pad).__name__)
def test_padded_values_and_their_gradients_are_in_the_format_of_the_values(pad: nn.Module) -> None:
    @made_of(lambda: {"scale": nn.Parameter(torch.ones(())), "pad": pad})
    class Padded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            last = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
            y = self.pad((x * self.scale).contiguous(memory_format=last))
            return (y.contiguous() ** 2).sum()

    is_flat = type(pad).__name__.endswith("2d")
    assert not other_layouts(Padded(), torch.randn(2, 3, *(6,) * (2 if is_flat else 3)))


@pytest.mark.parametrize("_run", range(2))
def test_a_capture_is_the_same_whatever_was_captured_before(_run: int) -> None:
    """PyTorch caches fake results, and of what clones a memory it loses where it lies."""
    model, x = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), torch.randn(2, 4, 8, 8)
    plan = Planner(model, x, differentiable="all").plan(1.0)
    module = RockmateModule(model, x, plan=plan)
    eager = copy.deepcopy(model)
    assert torch.equal(module(x), eager(x))


class Unpooling(nn.Module):
    """Puts maxima back to where they were."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        maxima, places = functional.max_pool2d(y, 2, return_indices=True)
        return functional.max_unpool2d(maxima, places, 2)


def test_unpooled_values_are_in_the_format_of_the_pooled_ones() -> None:
    assert not other_layouts(Mixed(Unpooling()), torch.randn(2, 3, 6, 6))


ELEMENTWISE = (
    functional.elu, functional.hardswish, functional.hardtanh, functional.leaky_relu,
    functional.logsigmoid, functional.mish, functional.softplus, functional.glu, torch.exp2,
)  # fmt: skip


@pytest.mark.parametrize("function", ELEMENTWISE, ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reads", [(1, 0), (0, 1), ("sum", 1)], ids=str)
def test_elementwise_functions_of_transposed_values(
    function: Any, dtype: torch.dtype, reads: tuple[Any, int]
) -> None:
    @made_of(lambda: {"layer": nn.Linear(6, 6)})
    class Transposing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            y = function(y.t().contiguous().t() if reads[1] else y)
            if reads[0] == "sum":
                return y.sum()
            return (y.t() if reads[0] else y).contiguous().square().sum()

    model, x = Transposing().to(dtype), torch.randn(4, 6, dtype=dtype)
    plain = copy.deepcopy(model)
    assert not other_layouts(model, x)
    module = RockmateModule(model, x, 1.0, numerics="bitwise")
    same_gradients(module, plain, lambda callee: callee(x).backward())


@pytest.mark.parametrize("is_last", [False, True])
def test_group_norms_read_gradients_in_the_format_of_their_values(is_last: bool) -> None:
    """PyTorch's kernel computes nonsense for others; autograd copies, if it knows the layouts."""
    torch.manual_seed(0)
    layers = [nn.GroupNorm(2, 8), nn.ELU(), nn.Conv2d(8, 8, 3)][: 2 + is_last]
    model, x = Mixed(nn.Sequential(*layers)).train(), torch.randn(2, 3, 8, 8)
    plain = copy.deepcopy(model)
    same_gradients(RockmateModule(model, x, 1.0), plain, lambda callee: callee(x).backward())


@made_of(lambda: {"first": nn.Conv2d(3, 8, 3), "norm": nn.GroupNorm(2, 8)})
class LaidOutLate(nn.Module):
    """What a group norm returns is read in channels-last, so its gradient comes in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x))
        return y.contiguous(memory_format=torch.channels_last).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_halves_lie_as_the_kernel_of_a_product_lays_them(dtype: torch.dtype) -> None:
    """The product of an expanded gradient with values lies as the values do, also in halves."""
    torch.manual_seed(0)
    model, x = LaidOutLate().to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
    plain = copy.deepcopy(model)
    assert not other_layouts(model, x)
    same_gradients(RockmateModule(model, x, 1.0), plain, lambda callee: callee(x).backward())


@made_of(lambda softmax: {"first": nn.Conv2d(3, 8, 3), "softmax": softmax})
class Soft(nn.Module):
    """A softmax of values in channels-last, whose gradient lies as they do."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        y = self.first(x).contiguous(memory_format=torch.channels_last)
        targets = targets.contiguous(memory_format=torch.channels_last)
        return (self.softmax(y, 1) * targets).sum()


@pytest.mark.parametrize("softmax", [torch.softmax, torch.log_softmax])
def test_a_softmax_does_not_write_into_memory_of_another_layout(softmax: Any) -> None:
    """Its kernel takes the memory that it is given for contiguous."""
    torch.manual_seed(0)
    model, x = Soft(softmax), (torch.randn(2, 3, 8, 8), torch.randn(2, 8, 6, 6))
    plain = copy.deepcopy(model)
    assert not other_layouts(model, x)
    same_gradients(RockmateModule(model, x, 1.0), plain, lambda callee: callee(*x).backward())


@made_of(lambda: {"scale": nn.Parameter(torch.ones(()))})
class Signs(nn.Module):
    """A sum of values with other signs, in the layout of the first operand."""

    def forward(self, x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
        return torch.copysign((x * self.scale).transpose(0, 2), signs.t()).sum()


def test_a_kernel_that_fake_tensors_run_in_several_steps() -> None:
    assert not other_layouts(Signs(), (torch.randn(5, 10, 5), torch.randn(5, 10)))


@pytest.mark.parametrize("name", ["convnext", "longformer", "resnet", "t5"])
def test_models(name: str) -> None:
    assert not other_layouts(*architectures.case(name))


def test_a_view_of_another_layout_than_captured_is_refused() -> None:
    values = torch.arange(6.0).view(2, 3)
    assert torch.equal(as_strided(values, [3], [2]), torch.tensor([0.0, 2.0, 4.0]))
    with pytest.raises(UnsupportedModelError, match=r"strides \[1, 3\]. Call .contiguous\(\)"):
        as_strided(values.t(), [3], [2])
