"""Kinds of training loops that a random script draws: each does one thing that scripts do.

A habit changes the arguments of a call, the loss, or what stands between forward, backward and
optimizer step. `script` is the running `random_scripts.Run`.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from script_layers import WIDTH
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LOOPS: dict[str, Callable[[], Habit]] = {}
BATCHES = (
    "batch in an object", "batch in a dataclass", "batch in a named tuple", "batch in a user dict",
    "batch in a subclass of dict",
)  # fmt: skip


class Habit:
    """What a script does besides forward, backward and optimizer step. By default nothing.

    Attributes:
        is_measured: whether the peak of a step tells about the planned call alone.
        num_calls: forwards before the backward.
    """

    is_measured = True
    num_calls = 1
    makes_batches_smaller: tuple[int, ...] = ()

    def __init_subclass__(cls) -> None:
        words = "".join(f" {c.lower()}" if c.isupper() else c for c in cls.__name__)
        LOOPS[words.strip()] = cls

    def prepare(self, script: Any) -> None:
        """Before the first step."""

    def rows(self, step: int, rows: int) -> int:
        """Of a batch."""
        return rows

    def before(self, script: Any, step: int) -> None:
        """Before the first forward of a step."""

    def context(self, script: Any, step: int) -> Any:
        """Around forwards and loss."""
        return contextlib.nullcontext()

    def arguments(self, script: Any, step: int, given: dict[str, Any]) -> dict[str, Any]:
        """Keywords of a call."""
        return given

    def call(self, script: Any, step: int, call: Callable[[], Any]) -> Any:
        """Output of a call."""
        return call()

    def loss(self, script: Any, step: int, output: Tensor, loss: Tensor) -> Tensor:
        """Of one call."""
        return loss

    def between(self, script: Any, step: int) -> None:
        """Between the last forward and the backward."""

    def backward(self, script: Any, step: int, backward: Callable[[], None]) -> None:
        """Instead of the backward."""
        backward()

    def after(self, script: Any, step: int) -> None:
        """Between backward and optimizer step."""


def habit(name: str, **members: Any) -> None:
    """Adds a kind whose methods are single expressions, of the arguments behind `self`."""
    own = {key: staticmethod(each) if callable(each) else each for key, each in members.items()}
    type(name, (Habit,), own)


def before_step(number: int, name: str, change: Callable[[Any], Any]) -> None:
    """Adds a kind that changes the script before one step."""
    habit(name, before=lambda script, step: step == number and change(script))


# --- batches --------------------------------------------------------------------------------------


habit("SmallerBatches", rows=lambda step, rows: rows - 16 if step % 2 else rows)
habit("LargerBatches", rows=lambda step, rows: rows + 16 if step == 2 else rows)
# As many rows as other sizes: sizes coincide.
habit("BatchOfFour", rows=lambda step, rows: 4 if step == 1 else rows)


class _Own:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@dataclass
class _Data:
    x: Tensor
    note: str = "a"


class _Named(NamedTuple):
    x: Tensor


class _User(collections.UserDict[str, Any]):
    @property
    def x(self) -> Tensor:
        return self["x"]


class _Sub(dict[str, Any]):
    @property
    def x(self) -> Tensor:
        return self["x"]


for _name, _made in {
    "BatchInAnObject": _Own,
    "BatchInADataclass": _Data,
    "BatchInANamedTuple": _Named,
    "BatchInAUserDict": lambda x: _User(x=x),
    "BatchInASubclassOfDict": lambda x: _Sub(x=x),
}.items():
    habit(_name, arguments=lambda script, step, given, made=_made: given | {"x": made(given["x"])})


class AttributeOfTheInput(Habit):
    def arguments(self, script: Any, step: int, given: dict[str, Any]) -> dict[str, Any]:
        given["x"].domain_scale = 1.0 + step
        return given


class TensorAttributeOfTheInput(Habit):
    def arguments(self, script: Any, step: int, given: dict[str, Any]) -> dict[str, Any]:
        given["x"].domain_scale = torch.tensor(1.0 + step)
        return given


habit(
    "InputOfOtherStrides",
    arguments=lambda script, step, given: (
        given | {"x": given["x"].t().contiguous().t()} if step % 2 else given
    ),
)


class InputGradient(Habit):
    def arguments(self, script: Any, step: int, given: dict[str, Any]) -> dict[str, Any]:
        return given | {"x": given["x"].requires_grad_()}


habit(
    "InputGradientInSomeSteps",
    arguments=lambda script, step, given: given | {"x": given["x"].requires_grad_(step % 2 == 1)},
)


class InputIsAnActivation(Habit):
    """Another module of the script's runs before."""

    is_measured = False

    def prepare(self, script: Any) -> None:
        script.others.append(nn.Linear(WIDTH, WIDTH))

    def arguments(self, script: Any, step: int, given: dict[str, Any]) -> dict[str, Any]:
        return given | {"x": script.others[0](given["x"]).tanh()}


class JudgedByAnother(Habit):
    """Another network judges the output, and is trained in turn, on what the model has given."""

    is_measured = False

    def prepare(self, script: Any) -> None:
        self.judge = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        script.others.append(self.judge)

    def loss(self, script: Any, step: int, output: Tensor, loss: Tensor) -> Tensor:
        return loss + F.softplus(-self.judge(output.float())).mean()

    def after(self, script: Any, step: int) -> None:
        self.judge.zero_grad()
        given = script.last_output.float()
        scores = self.judge(given), self.judge(torch.ones_like(given))
        (F.softplus(scores[0]).mean() + F.softplus(-scores[1]).mean()).backward()


class JudgeOfAnother(Habit):
    """Before each step, another network is trained on what the frozen model says of its output."""

    is_measured = False

    def prepare(self, script: Any) -> None:
        self.maker = nn.Linear(WIDTH, WIDTH)
        script.others.append(self.maker)

    def before(self, script: Any, step: int) -> None:
        parameters = [each for each in script.model.parameters() if each.requires_grad]
        for each in parameters:
            each.requires_grad_(False)
        noise = torch.linspace(-1, 1, 48 * WIDTH).view(48, WIDTH)
        given = script.inputs(step, 3) | {"x": self.maker(noise).tanh().to(script.dtype)}
        F.softplus(-script.callee(**given).float()).mean().backward()
        for each in parameters:
            each.requires_grad_()


class InputOverwritten(Habit):
    def after(self, script: Any, step: int) -> None:
        for given in script.given:
            x = given["x"] if isinstance(given["x"], Tensor) else given["x"].x
            x.detach().fill_(3.0)


class PositionalArguments(Habit):
    def arguments(self, script: Any, step: int, given: dict[str, Any]) -> dict[str, Any]:
        script.is_positional = True
        return given


# --- the loss -------------------------------------------------------------------------------------


habit(
    "LossOfATransposedOutput",
    loss=lambda script, step, out, loss: loss + (out.t() @ out).square().mean() * 1e-2,
)


class LossOfStridedSlices(Habit):
    def loss(self, script: Any, step: int, output: Tensor, loss: Tensor) -> Tensor:
        both = torch.cat([output, output.detach().sin()], 1)
        return loss + (both * both.roll(1, 1)).mean()


habit(
    "LossWithOtherStridesLater",
    loss=lambda script, step, out, loss: (
        loss + out.sum() * 1e-3 if step == 3 else out.t().contiguous().cos().mean()
    ),
)
habit("LossOfSomeRows", loss=lambda script, step, out, loss: out[: len(out) // 2].square().mean())


class GradientPenalty(InputGradient):
    """A second derivative by the script."""

    is_measured = False

    def loss(self, script: Any, step: int, output: Tensor, loss: Tensor) -> Tensor:
        x = script.given[-1]["x"]
        x = x if isinstance(x, Tensor) else x.x
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return loss + (slope.norm(dim=-1) - 1).square().mean()


class GradientOfTheInputByTheScript(InputGradient):
    is_measured = False

    def between(self, script: Any, step: int) -> None:
        x = script.given[-1]["x"]
        x = x if isinstance(x, Tensor) else x.x
        (slope,) = torch.autograd.grad(script.losses[-1], x, retain_graph=True)
        script.seen.append(slope)


# --- calls and backwards --------------------------------------------------------------------------


habit("TwoCallsInFlight", num_calls=2)
# Two micro-batches, each with its own backward.
habit("Accumulation", before=lambda script, step: setattr(script, "num_micro_batches", 2))


class TwoBackwards(Habit):
    is_measured = False

    def backward(self, script: Any, step: int, backward: Callable[[], None]) -> None:
        sum(script.losses).backward(retain_graph=True)
        backward()


class CallWithoutGradientsBefore(Habit):
    is_measured = False

    def before(self, script: Any, step: int) -> None:
        with torch.no_grad():
            script.call(step, 5)


class CallWithoutGradientsBetween(Habit):
    is_measured = False

    def between(self, script: Any, step: int) -> None:
        with torch.no_grad():
            script.call(step, 6)


class EvalCallBetween(Habit):
    is_measured = False

    def between(self, script: Any, step: int) -> None:
        script.callee.eval()
        with torch.no_grad():
            script.seen.append(script.call(step, 7))
        script.callee.train()


class InferenceCall(Habit):
    is_measured = False

    def before(self, script: Any, step: int) -> None:
        if step % 2:
            script.callee.eval()
            with torch.inference_mode():
                script.call(step, 8)
            script.callee.train()


class CallWithoutABackward(Habit):
    is_measured = False

    def before(self, script: Any, step: int) -> None:
        if step % 2:
            script.call(step, 9)


class TrainedInEvalMode(Habit):
    def before(self, script: Any, step: int) -> None:
        if step == 2:
            script.callee.eval()

    def after(self, script: Any, step: int) -> None:
        script.callee.train()


class NothingRequiresAGradient(Habit):
    """In one step: nothing is trained, the loss is logged."""

    def before(self, script: Any, step: int) -> None:
        if step == 1:
            script.saved = [each.requires_grad for each in script.model.parameters()]
            script.model.requires_grad_(False)

    def backward(self, script: Any, step: int, backward: Callable[[], None]) -> None:
        if sum(script.losses).requires_grad:
            backward()

    def after(self, script: Any, step: int) -> None:
        if step == 1:
            for each, needed in zip(script.model.parameters(), script.saved, strict=False):
                each.requires_grad_(needed)


class OtherMethod(Habit):
    """Training through another method than forward, in some steps."""

    is_measured = False

    def call(self, script: Any, step: int, call: Callable[[], Any]) -> Any:
        if step % 2:
            return script.callee.encode(**script.given[-1])
        return call()


class BackwardInAThread(Habit):
    is_measured = False

    def backward(self, script: Any, step: int, backward: Callable[[], None]) -> None:
        with futures.ThreadPoolExecutor(1) as thread:
            thread.submit(backward).result()


class ErrorInAStep(Habit):
    """A bad batch is left out."""

    def before(self, script: Any, step: int) -> None:
        if step == 2:
            given = script.inputs(step, 4)
            given["x"] = torch.zeros(4, WIDTH + 1)
            with contextlib.suppress(RuntimeError, ValueError):
                script.callee(**given)


_autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
habit("Autocast", context=lambda script, step: _autocast())
habit("AutocastInSomeSteps", context=lambda script, step: _autocast(enabled=step >= 2))
habit("AutocastWithoutItsCache", context=lambda script, step: _autocast(cache_enabled=False))
habit(
    "KernelsOfAttention",
    context=lambda script, step: sdpa_kernel(
        [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION][: 1 + step % 2]
    ),
)
habit(
    "Anomalies",
    is_measured=False,
    context=lambda script, step: torch.autograd.set_detect_anomaly(step == 1, check_nan=False),
)


# --- the optimizer --------------------------------------------------------------------------------


for _name, _optimizer in {
    "Adam": partial(torch.optim.AdamW, lr=1e-3),
    "Momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}.items():
    habit(_name, prepare=lambda script, made=_optimizer: setattr(script, "make_optimizer", made))


class Schedule(Habit):
    def after(self, script: Any, step: int) -> None:
        for group in script.optimizer.param_groups:
            group["lr"] *= 0.5


habit("GradientsSetToZero", before=lambda script, step: setattr(script, "sets_to_none", False))
habit(
    "GradientsClipped",
    after=lambda script, step: nn.utils.clip_grad_norm_(script.model.parameters(), 1.0),
)


class StepsInTheBackward(Habit):
    is_measured = False

    def prepare(self, script: Any) -> None:
        def step(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(parameter.grad.to_dense(), alpha=0.01)
            parameter.grad = None

        for parameter in script.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(step)


class GradientsScaled(Habit):
    def backward(self, script: Any, step: int, backward: Callable[[], None]) -> None:
        backward()
        with torch.no_grad():
            for parameter in script.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)


# --- the model ------------------------------------------------------------------------------------


def _collect_gradients(script: Any) -> None:
    weight = script.model.head.weight
    weight.register_post_accumulate_grad_hook(lambda own: script.seen.append(own.grad.clone()))


def _as_hook(factor: float) -> Callable[..., Tensor]:
    return lambda *given: given[-1] * factor


before_step(2, "FrozenLater", lambda script: script.model.stem.requires_grad_(False))
before_step(2, "ModeOfASubmodule", lambda script: script.model.layers.eval())
before_step(1, "AccumulationHook", _collect_gradients)
before_step(1, "TensorHook", lambda run: run.model.stem.weight.register_hook(_as_hook(0.5)))
before_step(2, "ForwardHookLater", lambda run: run.model.stem.register_forward_hook(_as_hook(1.5)))
before_step(1, "HookOnTheModel", lambda run: run.callee.register_forward_hook(_as_hook(0.5)))
before_step(
    2, "LayerAppended", lambda run: run.model.blocks.append(copy.deepcopy(run.model.blocks[-1]))
)
before_step(
    2, "LayerSwapped", lambda run: setattr(run.model.blocks[0], "up", nn.Linear(WIDTH, 4 * WIDTH))
)
before_step(
    2,
    "WeightReplaced",
    lambda run: setattr(
        run.model.stem, "weight", nn.Parameter(run.model.stem.weight.detach() * 0.5)
    ),
)


class NoiseOfHooks(Habit):
    """Hooks that draw, so that their order counts."""

    is_measured = False  # they take memory themselves

    def before(self, script: Any, step: int) -> None:
        for each in script.model.blocks.parameters() if step == 1 else ():
            each.register_hook(lambda gradient: gradient + torch.rand_like(gradient))


class Toggled(Habit):
    def before(self, script: Any, step: int) -> None:
        script.model.blocks[0].requires_grad_(step % 2 == 0)
        script.model.blocks[1].requires_grad_(step % 2 == 1)


class FeaturesTappedLater(Habit):
    def before(self, script: Any, step: int) -> None:
        if step == 1:
            script.model.blocks[0].register_forward_hook(
                lambda module, args, output: script.taps.append(output)
            )

    def loss(self, script: Any, step: int, output: Tensor, loss: Tensor) -> Tensor:
        taps, script.taps[:] = list(script.taps), []
        return loss + sum(tap.square().mean() for tap in taps[-1:])


class WeightsLoaded(Habit):
    def before(self, script: Any, step: int) -> None:
        if step == 2:
            state = script.callee.state_dict()
            changed = {
                name: value * 0.9 if value.is_floating_point() else value
                for name, value in state.items()
            }
            script.callee.load_state_dict(changed)


class WeightsWritten(Habit):
    def before(self, script: Any, step: int) -> None:
        if step == 2:
            with torch.no_grad():
                script.model.stem.weight.mul_(0.5)
            script.model.head.bias.data = script.model.head.bias.data * 0.5


class CopyOfTheModel(Habit):
    """An average of the weights, by a copy."""

    is_measured = False

    def after(self, script: Any, step: int) -> None:
        if step == 1:
            script.copied = copy.deepcopy(script.model)
        if step > 1:
            with torch.no_grad():
                for slow, own in zip(
                    script.copied.parameters(), script.model.parameters(), strict=False
                ):
                    slow.lerp_(own, 0.1)


class DefaultDtype(Habit):
    def before(self, script: Any, step: int) -> None:
        if step == 2:
            script.model.double()
            script.dtype = torch.double
