"""Kinds of layers that a random script draws: each does one thing that models do.

A layer takes and returns a tensor of `ROWS x WIDTH`, or of other rows. What it needs besides, it
says: `takes` names an argument of the model's call that is passed on, `each_step` is what the
script changes before a step, `extra_loss` is added to the loss.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from made_of import made_of
from torch import Tensor, nn
from torch.ao.quantization import default_fused_act_fake_quant as Observed
from torch.ao.quantization import default_fused_per_channel_wt_fake_quant as FakeQuantize
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 16, 48

LAYERS: dict[str, Callable[[], nn.Module]] = {}


def kind(cls: type[nn.Module]) -> type[nn.Module]:
    """Adds a class of layers to the kinds, by its name in words."""
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in cls.__name__)
    LAYERS[words.strip()] = cls
    return cls


class Block(nn.Module):
    """A residual block, as most of a model is made of."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def block(
    name: str, result: Callable[[Any], Any] = lambda h: h, set_up: Callable[[Any], Any] = id
) -> None:
    """Adds a kind of blocks that a function sets up, and whose result goes through another one."""

    class Changed(Block):
        def __init__(self) -> None:
            super().__init__()
            set_up(self)

        def forward(self, x: Tensor) -> Tensor:
            return result(super().forward(x))

    LAYERS[name] = Changed


block("python random", lambda h: h * (1 + random.random()))
block("numpy random", lambda h: h * float(np.random.rand()))
block("activation that is read", lambda h: h * 2 if h.mean() > 0 else h)
block("item that is read", lambda h: h * (1 + 0.01 * h.detach().abs().mean().item()))
block("numpy inside", lambda h: h * torch.from_numpy(torch.rand(len(h), 1).numpy().round()))
block("cached function", lambda h: h * _ramp(WIDTH))
block("branch on a compiler", lambda h: h * (1 + torch.compiler.is_exporting()))
block("frozen part", set_up=lambda own: own.requires_grad_(False))
block("spectral norm", set_up=lambda own: nn.utils.parametrizations.spectral_norm(own.up))
block("old spectral norm", set_up=lambda own: nn.utils.spectral_norm(own.up))
block("weight norm", set_up=lambda own: nn.utils.parametrizations.weight_norm(own.up))


class Averaged(Block):
    """A block beside statistics in a buffer and a frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH)
        self.table.weight.requires_grad_(False)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        with torch.no_grad():
            self.update(h.mean(0))
        return h + self.average.clone() + self.table.weight.mean(0).clone()

    def update(self, mean: Tensor) -> None:
        raise NotImplementedError


# --- what the forward assigns or writes -----------------------------------------------------------


@kind
class ParameterDataAssigned(Averaged):
    def update(self, mean: Tensor) -> None:
        self.table.weight.data = self.table.weight.data * 0.9 + mean * 0.1


@kind
class ParameterDataElementSet(Averaged):
    def update(self, mean: Tensor) -> None:
        self.table.weight.data[0] = mean


@kind
class ParameterReplaced(Averaged):
    def update(self, mean: Tensor) -> None:
        value = self.table.weight * 0.9 + mean * 0.1
        self.table.weight = nn.Parameter(value, requires_grad=False)


@kind
class ParameterWrittenThroughDetach(Averaged):
    def update(self, mean: Tensor) -> None:
        self.table.weight.detach().copy_(self.table.weight * 0.9 + mean)


@kind
class BufferDataAssigned(Averaged):
    def update(self, mean: Tensor) -> None:
        self.average.data = self.average.data * 0.9 + mean * 0.1


@kind
class BufferReplaced(Averaged):
    def update(self, mean: Tensor) -> None:
        self.average = self.average * 0.9 + mean * 0.1


@kind
class BufferReset(Averaged):
    def update(self, mean: Tensor) -> None:
        self.average.set_(self.average * 0.9 + mean * 0.1)


@kind
class BufferInPlace(Averaged):
    def update(self, mean: Tensor) -> None:
        self.average.mul_(0.9).add_(mean, alpha=0.1)


@kind
class BufferOfAnotherSize(Averaged):
    """A memory that grows with each step."""

    def update(self, mean: Tensor) -> None:
        self.average = self.average + 0.1 * mean
        self.table.weight.data = torch.cat([self.table.weight.data, mean[None]])


@kind
class TrainedDataAssigned(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data = self.up.weight.data.clamp(-0.2, 0.2)
        return super().forward(x)


@kind
class TrainedWrittenInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.up.weight.copy_(F.normalize(self.up.weight, dim=1))
        return super().forward(x)


@kind
@made_of(lambda: {"scale": nn.Parameter(torch.ones(WIDTH)), "is_ready": False})
class SetUpFromData(Block):
    """As ActNorm: the first batch sets a scale."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.scale.data.copy_(1 / (x.detach().std(0) + 1))
            self.is_ready = True
        return super().forward(x * self.scale)


@kind
@made_of(
    lambda: {"scale": nn.Parameter(torch.ones(WIDTH)), "ready": nn.Buffer(torch.tensor(False))}
)
class SetUpFromDataByBuffer(Block):
    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0) + 1))
                self.ready.fill_(True)
        return super().forward(x * self.scale)


@kind
@made_of(lambda: {"slow": Block().requires_grad_(False)})
class MomentumEncoder(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, own in zip(self.slow.parameters(), self.parameters(), strict=False):
                slow.data = slow.data * 0.9 + own.data.view_as(slow) * 0.1
            target = self.slow(x)
        return super().forward(x) + 0.1 * target


@kind
class QueueWithPointer(Block):
    """As MoCo: rows of a buffer at a pointer that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(16, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        h = h + (h @ self.queue.clone().t()).softmax(-1) @ self.queue.clone()
        place = int(self.pointer)
        self.queue[place : place + 4] = h.detach()[:4]
        self.pointer[0] = (place + 4) % 16
        return h


# --- attributes -----------------------------------------------------------------------------------


@made_of(lambda: {"layer": nn.Linear(WIDTH, 4 * WIDTH)})
class _Emit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        y: Any = torch.tanh(h)
        y.side = h.abs().mean()
        return y


@made_of(lambda: {"layer": nn.Linear(4 * WIDTH, WIDTH)})
class _Take(nn.Module):
    def forward(self, y: Any) -> Tensor:
        return self.layer(y) * y.side


@kind
@made_of(lambda: {"body": nn.Sequential(_Emit(), _Take())})
class AttributeOfATensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@kind
@made_of(lambda: {"counter": 0})
class CounterThatIsRead(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        return super().forward(x) * (1 + 0.1 * self.counter)


@kind
@made_of(lambda: {"counter": 0})
class CounterThatBranches(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        return super().forward(x.sin() if self.counter % 2 else x.cos())


@kind
@made_of(lambda: {"calls": 0})
class CounterOfCalls(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@kind
@made_of(lambda: {"history": []})
class ListAppended(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.history.append(h.detach().mean())
        return h


@kind
@made_of(lambda: {"scales": [1.0]})
class ListThatIsRead(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.scales.append(0.9 * self.scales[-1])
        return super().forward(x) * self.scales[-1]


@kind
@made_of(lambda: {"heads": [None] * 2})
class ListSetByElement(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.heads[0] = super().forward(x)
        self.heads[1] = x.mean(1, keepdim=True)
        return self.heads[0] + self.heads[1]


@kind
@made_of(lambda: {"cache": {}})
class DictOfTheLastValue(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if "last" in self.cache:
            h = h + 0.1 * self.cache["last"].mean()
        self.cache["last"] = h.detach()
        return h


@kind
@made_of(lambda: {"cell": nn.GRUCell(WIDTH, WIDTH), "state": None})
class CarriedState(nn.Module):
    """As truncated backpropagation: a call begins where the last one has ended."""

    def forward(self, x: Tensor) -> Tensor:
        begins = self.state is None or len(self.state) != len(x)
        h = self.cell(x, torch.zeros_like(x) if begins else self.state)
        self.state = h.detach()
        return h


@kind
@made_of(lambda: {"_stats": {"ms": []}})  # no record has it
class ClockThatIsKept(Block):
    def forward(self, x: Tensor) -> Tensor:
        self._began = time.perf_counter()
        h = super().forward(x)
        self._stats["ms"].append(time.perf_counter() - self._began)
        return h


@kind
@made_of(lambda: {"aux": None})
class DetachedAttribute(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.aux = h.mean().detach()
        return h


@kind
@made_of(lambda: {"aux": None})
class DifferentiableAttribute(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.aux = h.square().mean()
        return h

    def extra_loss(self) -> Tensor:
        aux, self.aux = self.aux, None
        return aux


class Label(tuple[int, ...]):
    """As e3nn's irreps: a tuple with a length of its own."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


@kind
@made_of(lambda: {"label": Label((1, 2))})
class TupleOfAClassOfItsOwn(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.label[0]


class Config(dict[str, Any]):
    """As many configurations: a dict with attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@kind
@made_of(lambda: {"config": Config(scale=1.5), "flag": True, "name": "tanh"})
class SettingsThatChange(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = getattr(torch, self.name)(super().forward(x)) * self.config.scale
        return h * 2 if self.flag else h

    def each_step(self, step: int) -> None:
        self.config["scale"] = 1.5 - 0.5 * (step % 2)
        self.flag, self.name = step != 2, "sin" if step == 3 else "tanh"


@kind
class SubmoduleReplaced(Block):
    def each_step(self, step: int) -> None:
        if step == 2:
            self.up = nn.Linear(WIDTH, 4 * WIDTH)


@kind
@made_of(lambda: {"index": torch.arange(WIDTH - 1, -1, -1), "scale": torch.ones(WIDTH)})
class TensorInAnAttribute(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, self.index] * self.scale

    def each_step(self, step: int) -> None:
        self.scale = torch.full((WIDTH,), 1.0 + step)


@kind
@made_of(lambda: {"length": None, "angles": None})
class CacheOfALength(Block):
    """As rotary embeddings."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != self.length:
            self.length = len(x)
            self.angles = torch.arange(len(x))[:, None] * torch.ones(WIDTH) * 0.01
        return super().forward(x) * self.angles.cos()


@kind
class FunctionThatCloses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer, scale = nn.Linear(WIDTH, WIDTH), torch.full((WIDTH,), 0.5)
        self.layer = layer
        self.call = lambda x: x + layer(x) * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


# --- hooks and set-up -----------------------------------------------------------------------------


@kind
@made_of(lambda: {"is_ready": False})
class HookFromTheFirstCall(Block):
    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.is_ready = True
            self.up.register_forward_hook(lambda module, args, output: output * 1.1)
        return super().forward(x)


@kind
class HookThatFillsADict(Block):
    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Any] = {}
        self.up.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features["up"] = output

    def extra_loss(self) -> Tensor:
        return self.features.pop("up").square().mean()


class _Tap:
    def __init__(self, module: nn.Module) -> None:
        self.got: list[Tensor] = []
        module.register_forward_hook(lambda module, args, output: self.got.append(output))


@kind
class HookOfAnObjectOfTheScript(Block):
    def __init__(self) -> None:
        super().__init__()
        self.taps = [_Tap(self.down)]

    def extra_loss(self) -> Tensor:
        total = self.taps[0].got[-1].square().mean()
        self.taps[0].got.clear()
        return total


@kind
class HookThatChangesAnOutput(Block):
    def __init__(self) -> None:
        super().__init__()
        self.down.register_forward_hook(lambda module, args, output: output * 1.5)
        self.up.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))


@kind
class HookOnAnActivation(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.5)
        return h * 1.0


@kind
class HookOfTheBackward(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.up.register_full_backward_hook(
            lambda module, given, taken: self.norms.append(float(taken[0].norm()))
        )


@kind
@made_of(lambda: {"layer": nn.LazyLinear(WIDTH)})
class LazyLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


@kind
@made_of(lambda: {"layer": None})
class MadeByTheFirstCall(nn.Module):
    """A layer that the first call makes, as code without lazy modules does."""

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            self.layer = nn.Linear(x.shape[1], WIDTH)
        return x + torch.tanh(self.layer(x))


# --- globals --------------------------------------------------------------------------------------

SCALE = 1.0


class Settings:
    scale = 1.0
    table: dict[str, float] = {"scale": 1.0}  # noqa: RUF012


@kind
class GlobalThatIsRead(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE

    def each_step(self, step: int) -> None:
        global SCALE
        SCALE = 1.0 + 0.1 * step


@kind
class ClassAttributeThatIsRead(Block):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale * Settings.table["scale"]

    def each_step(self, step: int) -> None:
        type(self).scale = 1.0 + 0.1 * step
        Settings.table["scale"] = 1.0 - 0.1 * step


_COUNTS, _LOCAL = bytearray(1), threading.local()
_VARIABLE = contextvars.ContextVar("calls", default=1)


def _counted() -> None:
    """Has a number as an attribute."""


@kind
class CountersOutside(Block):
    """Changes a class, a global name, an attribute of a function, and what is no plain object."""

    number = 0

    def __init__(self) -> None:
        global SCALE
        super().__init__()
        SCALE, type(self).number, _counted.number = 1.0, 0, 0  # pyright: ignore
        _COUNTS[0], _LOCAL.number = 1, 1
        _VARIABLE.set(1)

    def forward(self, x: Tensor) -> Tensor:
        global SCALE
        SCALE += 0.1
        type(self).number += 1
        _counted.number += 1  # pyright: ignore
        _COUNTS[0] += 1
        _LOCAL.number += 1
        _VARIABLE.set(_VARIABLE.get() + 1)
        x = x * (1 + 0.1 / (_COUNTS[0] * _LOCAL.number * _VARIABLE.get()))
        return super().forward(x) * SCALE / (type(self).number + _counted.number)  # pyright: ignore


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * Settings.scale


@kind
class ClassAttributeInABackward(Block):
    """As gradient reversal with a schedule."""

    def forward(self, x: Tensor) -> Tensor:
        return _Reversed.apply(super().forward(x))  # pyright: ignore

    def each_step(self, step: int) -> None:
        Settings.scale = 1.0 - 0.3 * step


@functools.lru_cache(maxsize=8)
def _ramp(width: int) -> Tensor:
    return torch.linspace(0.5, 1.0, width)


_TABLE: dict[int, Tensor] = {}


@kind
class TableOfTheFile(Block):
    def forward(self, x: Tensor) -> Tensor:
        if WIDTH not in _TABLE:
            _TABLE[WIDTH] = torch.ones(WIDTH) * 0.7
        return super().forward(x) * _TABLE[WIDTH]


@kind
class GradientModeByACompiler(Block):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            x = x.detach().requires_grad_() + 0.5 * x
        return super().forward(x)


# --- embeddings and arguments ---------------------------------------------------------------------


@kind
@made_of(lambda: {"table": nn.Embedding(40, WIDTH, sparse=True)})
class SparseEmbedding(nn.Module):
    takes = "ids"
    is_measured = False  # sparse gradients are no memory in place

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.table(ids[: len(x)])


@kind
@made_of(lambda: {"table": nn.EmbeddingBag(40, WIDTH)})
class EmbeddingBagOfOffsets(nn.Module):
    takes = "ids"

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.table(ids[: len(x)], torch.arange(0, len(x)))


@kind
@made_of(lambda: {"table": nn.Embedding(40, WIDTH, max_norm=0.5)})
class EmbeddingOfLargestNorm(nn.Module):
    takes = "ids"

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.table(ids[: len(x)])


@kind
class Segments(Block):
    """Packed sequences: a cut of each call's own."""

    takes = "cuts"

    def forward(self, x: Tensor, cuts: Tensor) -> Tensor:
        ends = [0, *cuts.tolist(), len(x)]
        forward = super().forward
        return torch.cat([forward(x[i:j]) for i, j in itertools.pairwise(ends)])


@kind
class NumberReadFromAnArgument(Block):
    takes = "number"

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * float(number))


@kind
class RepeatsReadFromAnArgument(Block):
    takes = "number"

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        for _ in range(1 + int(number) % 3):
            x = super().forward(x)
        return x


@kind
class Temperature(Block):
    """A Python number among the arguments."""

    takes = "temperature"

    def forward(self, x: Tensor, temperature: float) -> Tensor:
        return super().forward(x) / temperature


@kind
@made_of(lambda: {"tasks": nn.ModuleDict({"a": Block(), "b": Block()})})
class Task(nn.Module):
    """A string among the arguments."""

    takes = "task"

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.tasks[task](x)


@kind
class ArgumentsThatMayBeAbsent(Block):
    takes = "optional"

    def forward(self, x: Tensor, optional: Tensor | None) -> Tensor:
        return super().forward(x if optional is None else x + optional[: len(x)])


@kind
class Masked(Block):
    """What rows a mask has, and whether it has any."""

    takes = "cuts"

    def forward(self, x: Tensor, cuts: Tensor) -> Tensor:
        mask = torch.arange(len(x)) < cuts[0]
        h = super().forward(x)
        return h if mask.all() else torch.cat([h[mask] * 2, h[~mask]])


# --- what requires gradients ----------------------------------------------------------------------


@kind
class NoGradPart(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = super().forward(x)
        return super().forward(x) * torch.sigmoid(gate)


@kind
class DetachedBranch(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x.detach())


@kind
@made_of(lambda: {"zero": nn.Buffer(torch.tensor(0.0))})
class BufferThatRequiresAGradient(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.zero.requires_grad_(self.training)
        return super().forward(x) + self.zero


@kind
class ToggledInTheScript(Block):
    def each_step(self, step: int) -> None:
        self.up.requires_grad_(step % 2 == 0)


@kind
@made_of(lambda: {"seen": [], "hidden": None})
class RetainedGradient(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if h.requires_grad:
            h.retain_grad()
        self.hidden = h
        return h * 2

    def after_backward(self) -> None:
        self.seen.append(self.hidden.grad)
        self.hidden = None


@kind
class GradientInside(Block):
    """Forces: the gradient of an energy, differentiated again."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            energy = super().forward(leaf).square().sum()
            (force,) = torch.autograd.grad(energy, leaf, create_graph=True)
        return x + 0.1 * force


@kind
class FirstGradientInside(Block):
    """Adversarial training within the forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            shift = torch.zeros_like(x).requires_grad_()
            loss = super().forward(x.detach() + shift).square().sum()
            (slope,) = torch.autograd.grad(loss, shift)
        return super().forward(x + 0.01 * slope.sign())


@kind
@made_of(lambda: {"block": Block()})
class OwnCheckpoint(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # pyright: ignore


@kind
@made_of(lambda: {"block": Block()})
class OwnReentrantCheckpoint(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=True)  # pyright: ignore


# --- random numbers and values --------------------------------------------------------------------


@kind
class Dropout(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


@kind
class TorchRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.rand_like(x)) * torch.randint(1, 3, (1,))


@kind
@made_of(lambda: {"generator": torch.Generator().manual_seed(3)})
class GeneratorOfItsOwn(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * torch.randn(x.shape, generator=self.generator)


@kind
@made_of(lambda: {"blocks": nn.ModuleList(Block() for _ in range(2))})
class LayerDrop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.3:
                x = block(x)
        return x


@kind
@made_of(lambda: {"gate": nn.Linear(WIDTH, 3), "experts": nn.ModuleList(Block() for _ in range(3))})
class Experts(nn.Module):
    """Rows are routed by value."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen, out = scores.argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            if len(rows):
                out[rows] = expert(x[rows]) * scores[rows, index, None]
        return x + out


@kind
class NormalDistribution(Block):
    def forward(self, x: Tensor) -> Tensor:
        mean, scale = super().forward(x), F.softplus(x) + 0.1
        return torch.distributions.Normal(mean, scale).rsample()


@kind
class CategoricalDistribution(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        policy = torch.distributions.Categorical(logits=h)
        return h + policy.log_prob(policy.sample())[:, None]


# --- parts of PyTorch -----------------------------------------------------------------------------


@kind
class SequentialBlock(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH))


@kind
@made_of(lambda: {"layer": nn.LSTM(WIDTH, WIDTH)})
class Recurrent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x.view(-1, 4, WIDTH))[0].reshape(x.shape)


@kind
@made_of(lambda: {"layer": nn.GRU(WIDTH, WIDTH)})
class PackedRecurrent(nn.Module):
    takes = "cuts"

    def forward(self, x: Tensor, cuts: Tensor) -> Tensor:
        rows = x.view(-1, 4, WIDTH)
        lengths = torch.full((4,), len(rows)).sub(torch.arange(4) * (cuts[0] % 3)).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], total_length=len(rows))
        return x + padded.reshape(x.shape)


@kind
@made_of(lambda: {"layer": nn.MultiheadAttention(WIDTH, 2, dropout=0.1)})
class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 4, WIDTH)
        return x + self.layer(rows, rows, rows, need_weights=False)[0].reshape(x.shape)


class _Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) + x


@kind
@made_of(lambda: {"inner": torch.jit.script(_Scripted())})
class ScriptedPart(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


@kind
@made_of(lambda: {"block": Block(), "norm": nn.BatchNorm1d(WIDTH)})
class BatchNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(x))


@kind
class BatchNormWithoutMomentum(BatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)


@kind
@made_of(lambda: {"norm": nn.LayerNorm(WIDTH)})
class LayerNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@kind
@made_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH), "fake": FakeQuantize(), "most": Observed()})
class FakeQuantized(nn.Module):
    """Ops write buffers, and give one another size at first."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.most(x.tanh().relu()), self.fake(self.linear.weight))


@kind
@made_of(lambda: {"norm": nn.GroupNorm(2, WIDTH), "layer": nn.Conv1d(WIDTH, WIDTH, 1)})
class GroupNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x.view(-1, 4, WIDTH).mT)).mT.reshape(x.shape)


@kind
@made_of(lambda: {"conv": nn.Conv2d(4, 4, 1), "norm": nn.BatchNorm2d(4)})
class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
        return x + F.dropout(self.norm(self.conv(image)), 0.1).reshape(x.shape)


@kind
@made_of(lambda: {"conv": nn.Conv2d(4, 4, 1), "norm": nn.BatchNorm2d(4)})
class PooledChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
        pooled = F.adaptive_avg_pool2d(self.conv(image), 1)
        return x + F.dropout(self.norm(pooled) + image, 0.1).reshape(x.shape)


@kind
class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.again = self.block

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.block(x))


@kind
class TiedWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(self.up(x).sin(), self.up.weight.t())


@kind
class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x) * 1.0
        h[:, 0] = h[:, 0] * 0.5
        return F.relu(h.add_(1), inplace=True)


@kind
@made_of(lambda: {"weight": nn.Parameter(torch.randn(WIDTH // 2 + 1, WIDTH // 2 + 1, 2) * 0.2)})
class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft(torch.fft.rfft(x) @ torch.view_as_complex(self.weight), WIDTH)


@kind
@made_of(lambda: {"layer": nn.Linear(4 * 9, WIDTH)})
class Unfolded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 2, 2, 4).permute(0, 3, 1, 2)
        return x + self.layer(F.unfold(image, 3, padding=1).mT.mean(1))


@kind
class AutocastInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = super().forward(x)
        return h.float()


class _OnHost(torch.autograd.Function):
    """A kernel of somebody's own: it leaves PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.from_numpy(x.detach().numpy() * float(scale.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradients[0] * scale, (gradients[0] * x).sum()


@kind
@made_of(lambda: {"scale": nn.Parameter(torch.tensor(0.5))})
class OpaqueFunctionOfAScalar(Block):
    def forward(self, x: Tensor) -> Tensor:
        return _OnHost.apply(super().forward(x), self.scale)  # pyright: ignore


class _Solver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        leaves = [x, *ctx.layer.parameters()]
        found = torch.autograd.grad(y, leaves, gradients[0])
        return found[0], None, *found[1:]


@kind
@made_of(lambda: {"block": Block()})
class SolverInAFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Solver.apply(x, self.block, *self.block.parameters())  # pyright: ignore


@kind
class TensorSubclassMethods(Block):
    """Views, item assignment by masks, and shapes that are computed with."""

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.size()
        h = super().forward(x).reshape(rows // 4, 4 * width)
        h = h.masked_fill(h > 2, 0.5).view(rows, -1)
        return h.unflatten(-1, (2, width // 2)).flip(1).flatten(1)


@kind
class OddContexts(Block):
    """Contexts around parts of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autograd.set_grad_enabled(torch.is_grad_enabled()))
            stack.enter_context(torch.profiler.record_function("part"))
            return super().forward(x)
