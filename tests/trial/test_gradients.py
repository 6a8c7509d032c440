"""Wrong gradients of any kind are found within four steps, inside the budget."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from made_of import made_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trial_net import BATCHES, Counting, Net, without_op

from rockmate import RockmateModule, TrialError, UnsupportedModelError
from rockmate._torch.allocator import timeline
from rockmate.capture import sample
from rockmate.frames.frame import Frame
from rockmate.runtime.gradient_sink import GradientSink
from rockmate.runtime.step_arguments import Backwards
from rockmate.trial.steps import TrialSteps

Patch = pytest.MonkeyPatch
SCALE = lambda: 1.0  # noqa: E731


@pytest.fixture(autouse=True)
def has_time(monkeypatch: Patch) -> None:
    monkeypatch.setattr(TrialSteps, "has_time", True)


def around_sink(patch: Patch, change: Callable[[str, Tensor], tuple[str, Tensor] | None]) -> None:
    """Has gradients accumulated as `change(name, gradient)` says; None drops one."""
    accumulate = GradientSink.accumulate

    def changed(self: Any, name: str, gradient: Tensor, *, is_final: bool) -> None:
        if (found := change(name, gradient)) is not None:
            accumulate(self, *found, is_final=is_final)

    patch.setattr(GradientSink, "accumulate", changed)


OTHERS = {"norm.weight": "norm.bias", "norm.bias": "norm.weight"}
CHANGES: dict[str, Callable[[str, Tensor], tuple[str, Tensor] | None]] = {
    "dropped": lambda name, each: None if name == "norm.bias" else (name, each),
    "scaled": lambda name, each: (name, each * 1.001),
    "of_other_parameters": lambda name, each: (OTHERS.get(name, name), each),
    "in_another_order": lambda name, each: (name, each.reshape(each.shape[::-1]).t()),
}


def op_of_backward_changed(patch: Patch, _: Any) -> None:
    def change(node: Any) -> None:
        node.kwargs = {**node.kwargs, "approximate": "tanh"}

    without_op(patch, "gelu_backward", change)


def saved_value_changed(patch: Patch, _: Any) -> None:
    take = Backwards.take_arguments

    def changed(*args: Any) -> list[Any]:
        found = take(*args)
        floats = [n for n in found if isinstance(n, Tensor) and n.shape == (64, 32)]
        floats[0].data.mul_(2)
        return found

    patch.setattr(Backwards, "take_arguments", changed)


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return grad * globals()["SCALE"]()  # as no name tells


def global_of_a_backward(patch: Patch, model: Any) -> Any:
    model.norm.register_forward_hook(lambda _, __, output: Scaling.apply(output))
    return lambda step: patch.setitem(globals(), "SCALE", lambda: 1.0 + step)


def backward_by_a_compiler(patch: Patch, model: Any) -> None:
    global_of_a_backward(patch, model)
    patch.setitem(globals(), "SCALE", lambda: 2.0 if torch.compiler._is_compiling_flag else 1.0)


def hook_on_an_activation(_: Patch, model: Any) -> None:
    def hooked(_: Any, __: Any, output: Tensor) -> None:
        if not torch.compiler._is_compiling_flag:
            output.register_hook(lambda grad: grad * 2)

    model.norm.register_forward_hook(hooked)


def branch_without_a_value(_: Patch, model: Any) -> None:
    def detached(_: Any, __: Any, output: Tensor) -> Tensor:
        half = output * 0.5
        return half + (half if torch.compiler._is_compiling_flag else half.detach())

    model.norm.register_forward_hook(detached)


PLANTED: dict[str, Callable[..., Any]] = {
    name: partial(lambda change, patch, _: around_sink(patch, change), change)
    for name, change in CHANGES.items()
} | {
    each.__name__: each
    for each in (
        op_of_backward_changed, saved_value_changed, backward_by_a_compiler, global_of_a_backward,
        hook_on_an_activation, branch_without_a_value,
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "budget"),
    [
        *((plant, 0.6) for plant in PLANTED),
        *((plant, 1.0) for plant in ("dropped", "saved_value_changed", "global_of_a_backward")),
    ],
)
def test_wrong_gradient_is_found_within_four_steps(
    plant: str, budget: float, monkeypatch: Patch
) -> None:
    model = Net()
    before_step = PLANTED[plant](monkeypatch, model) or (lambda _: None)
    module = RockmateModule(model, BATCHES[0], budget, numerics="bitwise", trial="log")
    with pytest.raises(TrialError, match="the gradient of"):
        _train(module, before_step)
    assert all(each.grad is None for each in model.parameters())


def test_wrong_gradient_of_frames_is_found(monkeypatch: Patch) -> None:
    class Loss(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    unpack = Frame._unpack

    def changed(self: Frame, packed: Any) -> Tensor:
        found = unpack(self, packed)
        return found * 1.01 if found.shape == (64, 128) else found

    monkeypatch.setattr(Frame, "_unpack", changed)
    model = Loss(*(Counting() for _ in range(6)))
    module = RockmateModule(model, None, 0.7, mode="frames", plan_frames=False, trial="log")
    with pytest.raises(TrialError, match="the gradient of"):
        _train(module, lambda _: None)


def _train(module: nn.Module, before_step: Callable[[int], None]) -> None:
    for step, batch in enumerate(BATCHES):
        before_step(step)
        output = module(batch)
        (output["loss"] if isinstance(output, dict) else output).backward()
        module.zero_grad()


@made_of(lambda: {"inner": nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh())})
class Checkpointed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).square().mean()


def test_what_a_backward_changes_is_compared(monkeypatch: Patch) -> None:
    x = torch.randn(8, 32)
    with pytest.raises(UnsupportedModelError, match=r"inner\.1\.\w+ is updated in a check"):
        RockmateModule(Checkpointed(), x, 1.0)
    monkeypatch.setattr(sample, "refuse_unequal", lambda *_: None)
    module = RockmateModule(Checkpointed(), x, "1 MiB")
    with pytest.raises(TrialError, match="after the backward, inner"):
        module(x)
    model, plain = Checkpointed(), Checkpointed()
    plain.load_state_dict(model.state_dict())
    module = RockmateModule(model, x, "1 MiB", mode="auto")
    for _ in range(3):
        plain(x).backward()
        module(x).backward()
    assert [*map(torch.equal, model.buffers(), plain.buffers())] == [True] * 3


@pytest.mark.parametrize("budget", [1.0, 0.6, 0.45])
def test_equal_gradients_are_compared_inside_the_budget(
    budget: float, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    module = RockmateModule(model, BATCHES[0], budget, numerics="bitwise", trial="log")
    with caplog.at_level(logging.INFO, logger="rockmate"):
        found = timeline(lambda: module(BATCHES[0])["loss"].backward())
    assert "gradients" not in caplog.text
    gradient_bytes = sum(each.nbytes for each in model.parameters())
    assert found.peak_bytes <= module.plan.budget_bytes + gradient_bytes


def test_gradients_from_before_are_left_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    model.norm.weight.grad = torch.ones(32)
    module = RockmateModule(model, BATCHES[0], 0.9, numerics="bitwise", trial="log")
    with caplog.at_level(logging.INFO, logger="rockmate"):
        module(BATCHES[0])
    assert "norm.weight has a gradient or a hook before the step" in caplog.text
    assert torch.equal(model.norm.weight.grad, torch.ones(32))


def test_a_hook_at_an_accumulation_node_fires_once(caplog: pytest.LogCaptureFixture) -> None:
    """It may step an optimizer."""
    model, calls = Net(), list[int]()
    node = torch.autograd.graph.get_gradient_edge(model.norm.weight).node
    node.register_hook(lambda *_: calls.append(1))
    module = RockmateModule(model, BATCHES[0], 0.9, numerics="bitwise", trial="log")
    with caplog.at_level(logging.INFO, logger="rockmate"):
        module(BATCHES[0])["loss"].backward()
    assert "norm.weight has a gradient or a hook before the step" in caplog.text
    assert calls == [1]


def test_data_that_an_inference_call_has_assigned(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    with torch.inference_mode():
        model.norm.bias.data = 2 * model.norm.bias.data
    module = RockmateModule(model, None, "1GiB", mode="frames", trial="always")
    with caplog.at_level(logging.INFO, logger="rockmate"):
        for _ in range(2):
            module(BATCHES[0])["loss"].backward()
            model.zero_grad()
    assert "norm.bias has a gradient or a hook before the step" in caplog.text
