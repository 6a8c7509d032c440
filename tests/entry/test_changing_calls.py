"""Calls that change from step to step in what is no size, or have no backward: as eager's."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_alike, assert_trains_alike
from made_of import made_of, mlp
from torch import Tensor, nn

from rockmate import RockmateModule, SignatureMismatchError

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


@made_of(lambda: {"blocks": nn.ModuleList(mlp(16, 64, nn.Tanh()) for _ in range(3))})
class Blocks(nn.Module):
    def forward(self, x: Any, tau: Any = 1.0, options: Any = None) -> Tensor:
        h = x if isinstance(x, Tensor) else x.x
        for block in self.blocks:
            h = h + block(h) / tau
        for _ in range((options or {}).get("extra", 0)):
            h = torch.tanh(h)
        return h


def compare(
    model: nn.Module, call: Callable[[nn.Module, int], Any], num_steps: int, **options: Any
) -> RockmateModule:
    """Steps of a module and of a copy of its model, bit for bit."""
    plain = copy.deepcopy(model)
    module = RockmateModule(model, budget=0.9, on_infeasible="least", numerics="bitwise", **options)
    loss: Callable[..., Tensor] = lambda m, step: call(m, step).square().mean()  # noqa: E731
    assert_trains_alike(module, plain, loss, num_steps)
    return module


# --- inputs in objects ----------------------------------------------------------------------------


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Mapped(UserDict[str, Tensor]):
    x = property(lambda self: self["x"])


class Sub(dict[str, Tensor]):
    __getattr__ = dict.__getitem__  # `copy` asks for others than "x"


@dataclasses.dataclass
class FromOthers:
    parts: dataclasses.InitVar[list[Tensor]]
    x: Tensor = dataclasses.field(init=False)

    def __post_init__(self, parts: list[Tensor]) -> None:
        self.x = torch.cat(parts)


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Cyclic:
    def __init__(self, x: Tensor) -> None:
        self.x, self.itself = x, self


@pytest.mark.parametrize(
    "wrap",
    [
        Plain,
        Slotted,
        Cyclic,
        lambda x: Mapped(x=x),
        lambda x: Sub(x=x),
        lambda x: FromOthers([x[:32], x[32:]]),
        lambda x: Plain(Plain(x)).x,
    ],
)
@pytest.mark.parametrize("mode", ["plan", "auto"])
def test_an_input_in_any_object(wrap: Callable[[Tensor], Any], mode: Any) -> None:
    module = compare(
        Blocks(), lambda m, step: m(wrap(X[: 64 - 2 * (step % 2)] + step)), 4, mode=mode
    )
    assert module.frames is None


def test_one_tensor_twice_in_an_object_and_two_tensors_later() -> None:
    class Pair:
        def __init__(self, x: Tensor, y: Tensor) -> None:
            self.x, self.y = x, y

    class Both(Blocks):
        def forward(self, pair: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(pair) * pair.y

    compare(Both(), lambda m, step: m(Pair(X, X if step < 2 else X * 2)), 4)


# --- constants ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda m, step: m(X, tau=1.0 + step % 2),
        lambda m, step: m(X, 1.0 + step % 2),
        lambda m, step: m(X, 1.0, {"extra": step % 2}),
        lambda m, step: m(X, options={"extra": 1} if step % 2 else None),
    ],
)
@pytest.mark.parametrize("mode", ["plan", "auto"])
def test_constants_of_two_values_have_two_plans(call: Any, mode: Any) -> None:
    module = compare(Blocks(), call, 4, mode=mode)
    assert len(module._plans.runnables) == 2


@pytest.mark.parametrize(
    "given",
    [
        lambda step: {"tau": 1.0 + step},
        lambda step: {"options": {"files": [f"{step}.png", "a.png"]}},
        lambda step: {"options": {"cuts": [8] * step + [64 - 8 * step]}},
    ],
)
@pytest.mark.parametrize("mode", ["plan", "auto"])
def test_constants_new_in_each_call_turn_auto_to_frames_with_a_line(
    given: Callable[[int], Any], mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rockmate")
    module = compare(Blocks(), lambda m, step: m(X, **given(step)), 6, mode=mode)
    assert (module.frames is not None) == (mode == "auto")
    (line,) = (each for each in caplog.messages if "each needed a plan of its own" in each)
    for text in (line, caplog.messages[1]):  # of the second plan
        assert "leave out what the forward does not read" in text
    assert ("by frames" if mode == "auto" else 'mode="frames"') in line


@made_of(lambda: {"out": nn.AdaptiveLogSoftmaxWithLoss(16, 60, cutoffs=[8, 20])})
class Clustered(Blocks):
    """How many rows each cluster of classes gets follows from values."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.out(super().forward(x), targets).loss


def test_new_numbers_of_rows_turn_auto_to_frames(caplog: pytest.LogCaptureFixture) -> None:
    calls = [torch.randint(60, (64,)) for _ in range(8)]
    module = compare(Clustered(), lambda m, step: m(X, calls[step]), 8, mode="auto")
    assert module.frames is not None
    assert "each needed a plan of its own" in caplog.text


def test_plans_go_on_where_frames_refuse_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    plain = Blocks()
    options: Any = {"numerics": "bitwise", "mode": "auto", "plan_frames": False}
    module = RockmateModule(copy.deepcopy(plain), budget=0.65, **options)
    assert_trains_alike(module, plain, lambda m, step: m(X, tau=1.0 + step).square().mean(), 8)
    assert "plans are made on" in caplog.text


def test_the_call_that_differs_in_dtype_is_planned_for() -> None:
    model = nn.Sequential(nn.Embedding(9, 16), Blocks())
    plain = copy.deepcopy(model)
    module = RockmateModule(model, budget=0.9, on_infeasible="least")
    words = torch.randint(9, (64,))
    for given in (words, words.int(), words):
        assert torch.equal(module(given), plain(given))
    refusing = RockmateModule(model, words, 0.9, mode="auto", replan=False, on_infeasible="least")
    with pytest.raises(SignatureMismatchError):
        refusing(words.int())


# --- nothing requires a gradient ------------------------------------------------------------------


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = Blocks(), Blocks()


@pytest.mark.parametrize("mode", ["plan", "auto", "frames"])
def test_a_frozen_player_runs_the_plain_model(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rockmate")
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        gan = Gan()
        g, d = gan.g, gan.d
        if is_planned:
            options = {} if mode == "frames" else {"numerics": "bitwise"}
            g, d = (
                RockmateModule(each, budget=1.0, mode=mode, on_infeasible="least", **options)
                for each in (g, d)
            )
        for step in range(3):
            gan.d.requires_grad_(False)
            d(g(X + step)).square().mean().backward()
            gan.d.requires_grad_(True)
            gan.g.requires_grad_(False)
            fake = g(X + step)
            assert not fake.requires_grad
            d(fake).square().mean().backward()
            gan.g.requires_grad_(True)
        found.append([each.grad for each in gan.parameters()])
        if is_planned:
            assert isinstance(g, RockmateModule)
            assert (g.frames is None) == (mode != "frames")
    assert_alike(*found)
    assert (
        sum("no output of this call requires a gradient" in each for each in caplog.messages) == 1
    )


def test_a_call_found_to_have_no_backward_runs_plain_until_it_has_one() -> None:
    class Features(Blocks):
        is_frozen = True

        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            result = super().forward(x)
            return result.detach() if self.is_frozen else result

    module = RockmateModule(Features(), budget=0.9, on_infeasible="least")
    for _ in range(2):
        assert not module(X).requires_grad
    assert not module.is_planned
    module.original.is_frozen = False
    assert module(X).requires_grad
    module(X).sum().backward()
    assert module.is_planned
