"""Models that the user has brought into channels last: the same numbers as eager, and layouts as
captured; and a line in the log for a model that is not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import architectures
import pytest
import torch
from layouts import other_layouts
from made_of import made_of
from torch import Tensor, nn
from torch.nn import functional

from rockmate import Planner, RockmateModule
from rockmate.planning.session import PlanningSession
from rockmate.planning.step import CapturedStep, capture_step, checked_step

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@made_of(lambda *layers: {"layers": nn.Sequential(*layers)})
class Squared(nn.Module):
    """The mean square of what layers make of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Joined(nn.Module):
    """A stage with a skip connection, resized and concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.out = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        y = functional.interpolate(y + self.inner(functional.silu(y)), scale_factor=2.0)
        return self.out(torch.cat([x, y], 1)).flatten(2).transpose(1, 2)


def image(channels: int = 4, side: int = 8) -> Tensor:
    return torch.randn(2, channels, side, side)


cube = torch.randn(2, 2, 5, 5, 5)
SiLU, Conv, Up = nn.SiLU, nn.Conv2d, nn.ConvTranspose2d
CASES: dict[str, tuple[Sequence[nn.Module], Callable[[], Tensor]]] = {
    "plain": ((Conv(4, 8, 3), SiLU(), Conv(8, 6, 3)), image),
    "no bias": ((Conv(4, 8, 3, bias=False), nn.BatchNorm2d(8), SiLU()), image),
    "groups": ((Conv(4, 8, 3, groups=2), SiLU(), Conv(8, 8, 5, padding=2, groups=8)), image),
    "steps": ((Conv(4, 8, 3, stride=(2, 1), dilation=2), SiLU(), Conv(8, 8, 1)), image),
    "padding": ((Conv(4, 8, 3, 1, "same"), Conv(8, 8, 3, 1, 1, padding_mode="reflect")), image),
    "circular": ((Conv(4, 8, 3), Conv(8, 8, 3, padding=1, padding_mode="circular")), image),
    "transposed": ((Up(4, 8, 2, 2), SiLU(), Up(8, 8, 3, 2, output_padding=1)), image),
    "one channel": ((Conv(1, 8, 3), SiLU(), Conv(8, 1, 3)), lambda: image(1)),
    "one pixel": ((Conv(4, 8, 8), SiLU(), Conv(8, 8, 1)), image),
    "pools": ((Conv(4, 8, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), Conv(8, 8, 2)), image),
    "norms": ((Conv(4, 8, 3), nn.GroupNorm(2, 8), nn.Softmax(1), Conv(8, 8, 3)), image),
    "shuffled": ((Conv(4, 8, 3), nn.PixelShuffle(2), Conv(2, 8, 3)), image),
    "dropout": ((Conv(4, 8, 3), nn.Dropout2d(0.5), Conv(8, 8, 3)), image),
    "joined": ((Joined(), nn.Linear(4, 4)), image),
    "3d": ((nn.Conv3d(2, 4, 3), SiLU(), nn.ConvTranspose3d(4, 2, 3)), lambda: cube),
    "1d": ((nn.Conv1d(4, 8, 3), SiLU(), nn.Conv1d(8, 8, 3)), lambda: torch.randn(2, 4, 9)),
    "no batch": ((Conv(4, 8, 3), SiLU(), Conv(8, 8, 3)), lambda: torch.randn(4, 8, 8)),
}  # fmt: skip


def channels_last(value: Any) -> Any:
    """A tensor or module with its channels last."""
    if isinstance(value, Tensor):
        return value.contiguous(memory_format=_FORMATS.get(value.ndim, torch.contiguous_format))
    is_cube = any(each.ndim == 5 for each in value.parameters())
    return value.to(memory_format=_FORMATS[5 if is_cube else 4])


def captured(model: nn.Module, sample: Any) -> CapturedStep:
    return checked_step(lambda: capture_step(model, sample))


def gradients(callee: nn.Module, owner: nn.Module, *args: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    owner.zero_grad()
    callee(*args).backward()
    grads = {name: each.grad for name, each in owner.named_parameters()}
    return {name: each for name, each in grads.items() if each is not None}


def assert_alike(
    mine: dict[str, Tensor], theirs: dict[str, Tensor], *, rounding: float = 0.0
) -> None:
    assert mine.keys() == theirs.keys()
    scale = max(float(each.abs().max()) for each in theirs.values())
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=rounding, atol=rounding * scale / 100)
        assert mine[name].stride() == value.stride()


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_eagers_at_every_budget(name: str) -> None:
    torch.manual_seed(0)
    layers, make = CASES[name]
    model = channels_last(Squared(*copy.deepcopy(layers)).double().train())
    x, eager = channels_last(make().double()), copy.deepcopy(model)
    step = captured(model, x)
    assert not other_layouts(step)
    planning = PlanningSession.of(step)
    theirs = gradients(eager, eager, x)
    initial = copy.deepcopy(model.state_dict())
    for budget in (planning.baseline_peak_bytes, planning.minimum_peak_bytes):
        model.load_state_dict(initial)
        module = RockmateModule(model, x, plan=planning.plan(budget))
        assert_alike(gradients(module, model, x), theirs)
        for one, other in zip(model.buffers(), eager.buffers(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["convnext", "resnet", "segformer"])
def test_layouts_of_models(name: str) -> None:
    model, batch = architectures.case(name)
    batch = {key: channels_last(each) for key, each in batch.items()}
    assert not other_layouts(captured(channels_last(model), batch))


def changed_through(y: Tensor) -> Tensor:
    z = y * 1
    z.reshape(2, -1).mul_(torch.arange(288).to(y))  # of a copy, with channels last
    return z


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "view as": lambda y: y.contiguous().view_as(y.new_empty(2, 288)),
    "changed through reshape": changed_through,
    "as_strided": lambda y: y.as_strided((2, 288), (288, 1)) * torch.arange(288).to(y),
    "stride": lambda y: y * y.stride(1),
    "is_contiguous": lambda y: y * 2 if y.is_contiguous() else y,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_code_that_sees_layouts_sees_those_of_eager(name: str) -> None:
    @made_of(lambda: {"inner": nn.Conv2d(4, 8, 3), "out": nn.Conv2d(8, 4, 1)})
    class Between(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = FUNCTIONS[name](self.inner(x).tanh())
            return self.out(y.reshape(len(x), 8, 6, -1)).square().mean()

    torch.manual_seed(0)
    model, x = channels_last(Between().double()), channels_last(image().double())
    eager = copy.deepcopy(model)
    planner = Planner(model, x, kernels="fused")
    module = planner.module(planner.minimum_peak_bytes)
    assert_alike(gradients(module, model, x), gradients(eager, eager, x), rounding=1e-9)


@pytest.mark.parametrize("kernels", ["fused", "auto"])
def test_the_log_says_that_channels_last_may_be_faster(
    kernels: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Squared(Conv(4, 8, 3), SiLU(), Conv(8, 8, 3)), image()
    row = Squared(nn.Conv1d(4, 8, 3), SiLU()), torch.randn(2, 4, 9)
    for is_told, (each, sample) in ((True, (model, x)), (False, row)):
        with caplog.at_level(logging.INFO, logger="rockmate"):
            Planner(each, sample, kernels=kernels)
        assert (".to(memory_format=torch.channels_last)" in caplog.text) == is_told
        caplog.clear()
    with caplog.at_level(logging.INFO, logger="rockmate"):
        Planner(channels_last(model), channels_last(x), kernels=kernels)
    assert "channels_last" not in caplog.text


def test_batches_of_other_sizes_with_fused_kernels() -> None:
    model = channels_last(Squared(Conv(4, 8, 3), SiLU(), Conv(8, 8, 3)).double().train())
    eager, shapes = copy.deepcopy(model), ((4, 4, 12, 12), (3, 4, 12, 12), (2, 4, 10, 14))
    sample, *others = (channels_last(torch.randn(shape).double()) for shape in shapes)
    module = RockmateModule(model, sample, 1.0, kernels="fused")
    for x in (sample, *others):
        mine = gradients(module, model, x)
        assert_alike(mine, gradients(eager, eager, x), rounding=1e-9)


def test_autocast_weights() -> None:
    """What follows from a weight's gradient, a cast, follows its layout."""

    class Autocast(Squared):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    torch.manual_seed(0)
    model, x = Autocast(Conv(8, 16, 3), SiLU(), Conv(16, 8, 3)).train(), channels_last(image(8))
    model = channels_last(model)
    eager = copy.deepcopy(model)
    step = captured(model, x)
    assert not other_layouts(step)
    module = RockmateModule(model, x, plan=PlanningSession.of(step).plan(1.0))
    assert_alike(gradients(module, model, x), gradients(eager, eager, x))
