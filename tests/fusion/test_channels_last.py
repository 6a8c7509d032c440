"""Steps whose convolutions read channels last: the same numbers up to rounding, layouts as
captured, and a choice of the format by time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from architectures import ARCHITECTURES
from layouts import other_layouts
from torch import Tensor, nn
from torch.nn import functional

from rockmate import Plan, Planner, RockmateModule
from rockmate.capture.memory_format import reads_contiguous
from rockmate.graph.step_options import StepOptions
from rockmate.planning import checked_forms
from rockmate.planning.session import PlanningSession
from rockmate.step import CapturedStep, capture_step, checked_step


class Squared(nn.Module):
    """The mean square of what layers make of a tensor."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

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


def captured(model: nn.Module, sample: Any) -> CapturedStep:
    options = StepOptions(memory_format="channels_last")
    return checked_step(lambda: capture_step(model, sample, options))


def gradients(callee: nn.Module, owner: nn.Module, *args: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    owner.zero_grad()
    callee(*args).backward()
    grads = {name: each.grad for name, each in owner.named_parameters()}
    return {name: each for name, each in grads.items() if each is not None}


def assert_equal_up_to_rounding(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    scale = max(float(each.abs().max()) for each in theirs.values())
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-9, atol=1e-11 * scale)
        assert mine[name].stride() == value.stride()


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_eagers_up_to_rounding_at_every_budget(name: str) -> None:
    torch.manual_seed(0)
    layers, make = CASES[name]
    model, x = Squared(*copy.deepcopy(layers)).double().train(), make().double()
    eager = copy.deepcopy(model)
    step = captured(model, x)
    planning = PlanningSession.of(step)
    found = []
    for budget in (planning.baseline_peak_bytes, planning.minimum_peak_bytes):
        model.load_state_dict(eager.state_dict())
        module = RockmateModule(model, x, plan=planning.plan(budget))
        found.append(gradients(module, model, x))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert_equal_up_to_rounding(found[0], gradients(eager, eager, x))
    for mine, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", CASES)
def test_kernels_lay_out_results_as_captured(name: str) -> None:
    layers, make = CASES[name]
    assert not other_layouts(captured(Squared(*copy.deepcopy(layers)).train(), make()))


@pytest.mark.parametrize("name", ["convnext", "resnet", "segformer"])
def test_layouts_of_models(name: str) -> None:
    model, batch = architectures.make(name), ARCHITECTURES[name].make_batch(0)
    assert not other_layouts(captured(model, batch))


def test_the_format_that_is_faster_unplanned_serves_every_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Squared(Conv(8, 16, 3), SiLU(), Conv(16, 16, 3), SiLU(), Conv(16, 8, 3)), image(8)
    chosen_from: list[Sequence[Any]] = []
    in_one_format = checked_forms.in_one_format

    def noted(forms: Sequence[Any]) -> list[Any]:
        chosen_from.append(forms)
        return in_one_format(forms)

    monkeypatch.setattr(checked_forms, "in_one_format", noted)
    planner = Planner(model, x, kernels="fused")
    (forms,) = chosen_from
    formats = [form.step.options.memory_format for form in forms]
    assert formats == ["as_given", "channels_last"]
    assert planner.baseline_ms == min(form.baseline.time_ms for form in forms)

    monkeypatch.setattr(checked_forms, "in_one_format", lambda forms: list(forms)[-1:])
    planner = Planner(model, x, kernels="fused")
    plan = planner.plan(planner.minimum_peak_bytes)
    assert plan.options.memory_format == "channels_last"
    assert "channels last" in plan.summary()
    plan.save(tmp_path / "plan.json")
    eager = copy.deepcopy(model)
    own = gradients(planner.module(1.0), model, x)
    loaded = RockmateModule(model, x, plan=Plan.load(tmp_path / "plan.json"))
    again = gradients(loaded, model, x)
    assert all(torch.equal(own[key], again[key]) for key in own)
    for key, value in gradients(eager, eager, x).items():
        torch.testing.assert_close(own[key], value)


def test_batches_of_other_sizes_have_the_format_of_the_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checked_forms, "in_one_format", lambda forms: list(forms)[-1:])
    model = Squared(Conv(4, 8, 3), SiLU(), Conv(8, 8, 3)).double().train()
    eager = copy.deepcopy(model)
    module = RockmateModule(model, torch.randn(4, 4, 12, 12).double(), 1.0, kernels="fused")
    for shape in ((4, 4, 12, 12), (3, 4, 12, 12), (2, 4, 10, 14), (4, 4, 8, 8)):
        x = torch.randn(shape).double()
        mine = gradients(module, model, x)
        assert module.plan.options.memory_format == "channels_last"
        assert_equal_up_to_rounding(mine, gradients(eager, eager, x))


def test_numbers_are_drawn_as_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask is drawn in the order of memory, so it would be another one with channels last."""
    monkeypatch.setattr(checked_forms, "in_one_format", lambda forms: list(forms)[-1:])
    for dropout, expected in ((nn.Dropout(0.5), "as_given"), (nn.Dropout2d(0.5), "channels_last")):
        model = Squared(Conv(4, 8, 3), SiLU(), dropout, Conv(8, 8, 3)).double().train()
        x, eager = image().double(), copy.deepcopy(model)
        planner = Planner(model, x, kernels="fused")
        assert planner.plan(1.0).options.memory_format == expected
        mine = gradients(planner.module(planner.minimum_peak_bytes), model, x)
        assert_equal_up_to_rounding(mine, gradients(eager, eager, x))


def test_a_step_without_convolutions_of_contiguous_values_has_one_format() -> None:
    linear, conv = Squared(nn.Linear(4, 4)), Squared(Conv(4, 4, 3))
    assert not reads_contiguous(capture_step(linear, torch.randn(4, 4)).capture.joint.graph)
    assert reads_contiguous(capture_step(conv, image()).capture.joint.graph)
    rows = Squared(nn.Conv1d(4, 4, 3)), torch.randn(2, 4, 9)
    assert not reads_contiguous(capture_step(*rows).capture.joint.graph)
    laid_out = image().contiguous(memory_format=torch.channels_last)
    assert not reads_contiguous(capture_step(conv, laid_out).capture.joint.graph)


def test_a_format_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="memory_format is 'nhwc'; choose 'as_given' or"):
        StepOptions(memory_format="nhwc")  # pyright: ignore


def test_autocast_weights() -> None:
    """What follows from a weight's gradient, a cast, follows its layout."""

    class Autocast(Squared):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    torch.manual_seed(0)
    model, x = Autocast(Conv(8, 16, 3), SiLU(), Conv(16, 8, 3)).train(), image(8)
    eager = copy.deepcopy(model)
    step = captured(model, x)
    assert not other_layouts(step)
    module = RockmateModule(model, x, plan=PlanningSession.of(step).plan(1.0))
    for name, value in gradients(eager, eager, x).items():
        mine = gradients(module, model, x)[name]
        torch.testing.assert_close(mine, value, rtol=3e-2, atol=3e-3 * float(value.abs().max()))
        assert mine.is_contiguous()
