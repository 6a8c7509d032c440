"""A second run reads what the first one read, and leaves no trace; else it is an error by name."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import random
from array import array
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers import records_of
from made_of import made_of, mlp
from script_layers import LAYERS, WIDTH
from torch import Tensor, nn
from torch.ao.quantization import default_fused_act_fake_quant
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rockmate import RockmateModule
from rockmate.errors import BackwardError, RockmateError, UnsupportedModelError
from tests.frames.test_frames import framed


@made_of(lambda: {"norm": nn.BatchNorm1d(WIDTH), "body": mlp(WIDTH, 4 * WIDTH), "state": None})
class Body(nn.Module):
    """A block of layers; `state` is compared at the end."""

    state: Any

    def forward(self, x: Tensor) -> Any:
        return x + self.body(x * self.factor())

    def factor(self) -> Any:
        return 1.0


class Net(nn.Module):
    """Blocks one after the other."""

    def __init__(self, block: Callable[[], nn.Module] = Body) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(5))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Listed(Net):
    """Passes one list, which grows, as DenseNet does."""

    def __init__(self) -> None:
        super().__init__(Growing)

    def forward(self, x: Tensor) -> Tensor:
        found, cache = [x], [x]
        for block in self.blocks:
            found.append(block(found, cache))
        return self.head(found[-1])


class Growing(Body):
    def forward(self, found: list[Tensor], cache: list[Tensor]) -> Tensor:  # pyright: ignore
        cache.append(found[-1].detach())
        return self.body(torch.stack(found).sum(0) / len(cache))


class Shelf:
    """An object that forwards change."""

    def __init__(self) -> None:
        self.count, self.kept = 0, list[Tensor]()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shelf) and self.count == other.count


class Passed(Net):
    """Passes an object, which blocks change."""

    def __init__(self) -> None:
        super().__init__(Putting)

    def forward(self, x: Tensor) -> Tensor:
        shelf = Shelf()
        for block in self.blocks:
            x = block(x, shelf)
        return self.head(x)


class Putting(Body):
    def forward(self, x: Tensor, shelf: Shelf) -> Tensor:  # pyright: ignore
        shelf.count += 1
        shelf.kept.append(x.detach())
        return x + self.body(x / shelf.count + sum(shelf.kept))


@made_of(lambda: {"state": deque([1.0], maxlen=3)})
class InDeque(Body):
    def factor(self) -> Any:
        self.state.append(self.state[-1] + 0.1)
        return self.state[-1]


@made_of(lambda: {"state": [1.0] * 5000})
class InALongList(InDeque):
    """A list of all steps so far, which is not followed any more."""


@made_of(lambda: {"state": {"all": ([1.0],)}})
class Nested(Body):
    def factor(self) -> Any:
        self.state["all"][0].append(self.state["all"][0][-1] + 0.1)
        return self.state["all"][0][-1]


@made_of(lambda: {"state": Shelf()})
class InObject(Body):
    def factor(self) -> Any:
        self.state.count += 1
        return 1 / self.state.count


@made_of(lambda: {"state": torch.ones(1)})
class InTensor(Body):
    def factor(self) -> Any:
        self.state += 0.1
        return self.state.clone()


@made_of(lambda: {"state": [random.Random(3), np.random.default_rng(3), np.random.RandomState(3)]})
class Drawing(Body):
    """Draws from a generator of its own; each kind has its way to copy it."""

    def factor(self) -> Any:
        return self.state[0].random() + self.state[1].random() + self.state[2].rand()


@made_of(lambda: {"state": 0})
class LateStatistics(Body):
    """Batch normalization that begins later and counts no write."""

    def forward(self, x: Tensor) -> Tensor:
        self.state += 1
        if self.state > 2:
            mean, variance = self.norm.running_mean, self.norm.running_var
            x = functional.batch_norm(x, mean, variance, training=True)
        return super().forward(x)


@made_of(lambda: {"state": 0, "scale": nn.Buffer(torch.ones(2, WIDTH))})
class LateBuffer(Body):
    """Puts another tensor in the place of a buffer, from some step on."""

    def factor(self) -> Any:
        self.state += 1
        if self.state > 3:
            self.scale = self.scale * 0.9
        return self.scale.mean(0)


class Decaying(Body):
    """Changes a parameter in place in its forward."""

    def factor(self) -> Any:
        with torch.no_grad():
            self.body[0].get_parameter("weight").mul_(0.9)
        return 1.0


class Inferring(Body):
    """Tensors of inference mode count no writes."""

    def factor(self) -> Any:
        with torch.inference_mode():
            return float(self.body[0].get_parameter("weight").std())


class Marked(Body):
    """Sets itself up in the first call: hooks of the backward, and attributes of tensors."""

    def factor(self) -> Any:
        if self.state is None:
            self.state = 0
            self.body.register_full_backward_hook(lambda _, given, __: (given[0] * 0.5,))
            self.body[0].get_parameter("weight").register_hook(lambda given: given * 0.5)
        marked: Any = self.norm.running_mean, self.body[0].weight
        for tensor in marked:
            tensor.uses = getattr(tensor, "uses", 0) + 1
            self.state += tensor.uses
        return 1.0 + self.state / 1000

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@made_of(lambda: {"state": 0})
class PythonRandom(Body):
    draws_from = 0

    def factor(self) -> Any:
        self.state += 1
        return random.random() if self.state > self.draws_from else 1.0


def batch(seed: int) -> Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed))


Between = Callable[[nn.Module, int], None]


def trained(module: nn.Module, model: nn.Module, between: Between | None = None) -> list[Any]:
    """What steps leave, and attributes of modules."""

    def loss(callee: nn.Module, step: int) -> Tensor:
        value = callee(batch(step)).square().mean()
        if between is not None:
            between(model, step)
        return value

    found = records_of(module, model, loss, 6)
    return [*found, *(getattr(each, "state", None) for each in model.modules())]


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (dict, list)):
        values = (list(each.values()) if isinstance(each, dict) else each for each in (one, other))
        return all(map(is_same, *values))
    if isinstance(one, (random.Random, np.random.Generator, np.random.RandomState)):
        return one.random() == other.random()
    return bool(one == other)


def check(
    model: nn.Module, budget: float, between: Between | None = None, mode: Any = "frames"
) -> RockmateModule:
    plain = copy.deepcopy(model)
    expected = trained(plain, plain, between)
    module = RockmateModule(model, None, budget, mode=mode, on_infeasible="least")
    ours = trained(module, model, between)
    assert len(ours) == len(expected)
    assert all(map(is_same, ours, expected))
    return module


@made_of(lambda: {"fake": default_fused_act_fake_quant()})
class Observed(Body):
    """An op writes integers without counting it: the same at first."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.fake(x.tanh().relu()))


OF_SCRIPTS = ("dict of the last value", "attention", "recurrent")


@pytest.mark.parametrize("budget", [0.05, 0.6])
@pytest.mark.parametrize(
    "make",
    [
        Listed, Passed,
        *(lambda each=each: Net(each) for each in (
            InDeque, InALongList, Nested, InObject, InTensor, Drawing, LateStatistics, LateBuffer,
            Decaying, Inferring, PythonRandom, Marked, Observed,
        )),
        *(lambda name=name: Net(LAYERS[name]) for name in OF_SCRIPTS),
    ],
    ids=(
        "list", "object", "deque", "long list", "nested", "attribute", "tensor", "generators",
        "statistics", "buffer", "parameter", "inference", "python", "attributes and hooks",
        "integers", *OF_SCRIPTS,
    ),
)  # fmt: skip
def test_equal_to_eager(make: Callable[[], nn.Module], budget: float) -> None:
    check(make(), budget)


def evaluated_first(model: Any, step: int) -> None:
    for block in model.blocks:
        block.norm.train(step >= 1)


class Normed(Body):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def test_statistics_that_are_frozen_at_first() -> None:
    model: Any = Net(Normed)
    for block in model.blocks:
        block.norm.eval()
    check(model, 0.05, evaluated_first)


def replaced(model: Any, step: int) -> None:
    for block in model.blocks:
        block.body[0].bias = nn.Parameter(block.body[0].bias.detach() * 0.5)
        block.body[1] = nn.Tanh() if step % 2 else nn.GELU()


def frozen(model: Any, step: int) -> None:
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(step % 2 == 0)


def thawed(model: Any, step: int) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(True)


@pytest.mark.parametrize("budget", [0.05, 0.6])
@pytest.mark.parametrize("between", [replaced, thawed])
def test_members_replaced_before_the_backward(between: Between, budget: float) -> None:
    model = Net()
    if between is thawed:
        frozen(model, 1)
    check(model, budget, between)


def biases_changed(model: Any, step: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if step >= 3 and "bias" in name:
                parameter.mul_(0.9)


def memory_changed(model: Any, step: int) -> None:
    for parameter in model.parameters():
        if step >= 3:
            parameter.data = parameter.data * 0.9


def states_changed(model: Any, step: int) -> None:
    for block in model.blocks:
        block.state += 1


@made_of(lambda: {"state": torch.ones(WIDTH)})
class Stated(Body):
    def factor(self) -> Any:
        return self.state


@pytest.mark.parametrize("budget", [0.05, 0.6])
@pytest.mark.parametrize(
    ("block", "between"), [(Body, biases_changed), (Body, memory_changed), (Stated, states_changed)]
)
def test_what_is_read_again_and_was_changed_is_named(
    block: Callable[[], nn.Module], between: Between, budget: float
) -> None:
    model = Net(block)
    with pytest.raises(RockmateError, match=r"blocks\.\d.* was changed .*keep=\['blocks"):
        trained(framed(model, budget), model, between)


@made_of(lambda make: {"count": make([0])})
class Counts(Body):
    """Counts in what a method is bound to, or in an argument of a partial function."""

    def factor(self) -> Any:
        return 1.0 + self.count() / 100


class Counter:
    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def count(self) -> int:
        self.numbers[0] += 1
        return self.numbers[0]


class Variable:
    """One number, of a context."""

    def __init__(self, numbers: list[int]) -> None:
        self.value = ContextVar("value", default=numbers[0])

    def __getitem__(self, _: int) -> int:
        return self.value.get()

    def __setitem__(self, _: int, number: int) -> None:
        self.value.set(number)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: Counter(n).count, lambda n: partial(Counter.count, Counter(n)),
        *(lambda n, kind=kind: Counter(kind(n)).count for kind in (
            bytearray, partial(array, "l"), lambda _: (ctypes.c_long * 1)(), Variable,
            lambda n: n + [0] * 5000,
        )),
    ],
)  # fmt: skip
def test_counts_behind_functions_are_put_back(make: Any) -> None:
    model, plain = (Net(lambda: Counts(make)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    expected = trained(plain, plain)
    assert all(map(is_same, trained(framed(model, 0.05), model), expected))


class Drawn(Body):
    """Counts where nobody looks."""

    numbers = np.zeros(1 << 18)

    def factor(self) -> Any:
        Drawn.numbers[0] += 1
        return 1.0 + Drawn.numbers[0] / 100


def test_other_values_of_the_same_shape_are_named() -> None:
    model = Net(Drawn)
    with pytest.raises(UnsupportedModelError, match=r"keep=\['blocks\.0', 'blocks\.1', "):
        trained(framed(model, 0.05), model)
    keep = [f"blocks.{number}" for number in range(5)]
    trained(framed(Net(Drawn), 0.9, keep=keep), model)


class Clamped(Body):
    """Writes what is trained after it has been read, past autograd."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.get_parameter("body.0.weight").data.clamp_(-0.1, 0.1)
        return y


class Perturbed(Body):
    """Trains with noisy weights, which it puts back past autograd; a second run ends before."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get_parameter("body.0.weight")
        kept = weight.detach().clone()
        weight.data += 0.1 * torch.randn_like(kept)
        y = super().forward(x)
        weight.data.copy_(kept)
        return y


def test_parameters_that_a_second_run_leaves_changed_are_named() -> None:
    model = Net(Perturbed)
    with pytest.raises(UnsupportedModelError, match=r"parameter for a while.*'blocks\.0', 'blo"):
        trained(framed(model, 0.05), model)


@pytest.mark.parametrize("block", [Clamped, Perturbed])
def test_auto_leaves_whole_what_does_not_repeat_itself(
    block: type[Body], caplog: pytest.LogCaptureFixture
) -> None:
    blocks = iter([Body, block, Body, block, Body])
    module = check(Net(lambda: next(blocks)()), 0.9, mode="auto")
    assert module.frames is not None
    assert module.frames.paths == ("blocks.0", "blocks.2", "blocks.4")
    assert "left whole, as by keep=['blocks.1', 'blocks.3'], since blocks.3" in caplog.text


class OfIterator(Net):
    """Takes batches from an iterator, which no trial may use up."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(next(x) + next(x))


@pytest.mark.parametrize("mode", ["frames", "auto"])
def test_iterators_are_used_up_once(mode: Any) -> None:
    model = OfIterator()
    plain = copy.deepcopy(model)
    module = RockmateModule(model, None, 0.9, mode=mode, on_infeasible="least")
    for step in range(3):
        outputs = [each(iter([batch(step), batch(step + 1)])) for each in (module, plain)]
        for output in outputs:
            output.square().mean().backward()
        assert torch.equal(*outputs)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(is_same(ours.grad, theirs.grad) for ours, theirs in pairs)


@made_of(lambda make: {"make": make, "scales": [make()]})
class ReadsIterator(Body):
    """Takes each scale from an iterator of its own, which copies of the model do not share."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadsIterator:
        other = ReadsIterator(self.make)
        other.load_state_dict(self.state_dict())
        return other

    def factor(self) -> Any:
        return next(self.scales[0])


@pytest.mark.parametrize("mode", ["frames", "auto"])
@pytest.mark.parametrize(
    "make", [lambda: iter(range(1, 50)), lambda: (1.0 / n for n in range(1, 50))]
)
def test_iterators_of_a_module_are_used_up_once(
    mode: Any, make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    (model := Net()).blocks[1] = ReadsIterator(make)
    module = check(model, 0.9, mode=mode)
    assert module.frames is not None
    assert "blocks.0" in module.frames.paths
    assert "calls of blocks.1, and others like them, never run again" in caplog.text


def test_a_capture_takes_no_item_of_an_iterator() -> None:
    model = ReadsIterator(lambda: iter(range(1, 50)))
    with pytest.raises(UnsupportedModelError, match="item of the iterator 0, which a capture"):
        RockmateModule(model, (batch(0),), 0.9)
    assert next(model.scales[0]) == 1


class LatePythonRandom(PythonRandom):
    draws_from = 3


def test_random_numbers_of_python_that_come_late_are_named() -> None:
    model = Net(LatePythonRandom)
    with pytest.raises(UnsupportedModelError, match="which no call of the model did before"):
        trained(framed(model, 0.05, plan_frames=False), model)


class Differentiating(Body):
    def factor(self) -> Any:
        x = torch.ones(4, WIDTH, requires_grad=True)
        return torch.autograd.grad(self.body(x).sum(), x)[0].mean()


def test_a_backward_within_a_frame_names_what_works() -> None:
    model = Net(Differentiating)
    with pytest.raises(BackwardError, match=r"keep=\['blocks\.4'\]"):
        trained(framed(model, 0.05), model)


@pytest.mark.parametrize("mode", ["auto", "frames"])
def test_an_error_of_the_models_own_leaves_what_it_leaves_in_eager(mode: Any) -> None:
    def refuse(*_: Any) -> None:
        if step % 2 == 0:
            raise KeyError

    model = Net(Normed)
    model.blocks[2].register_forward_pre_hook(refuse)
    plain = copy.deepcopy(model)
    module = RockmateModule(model, None, 0.9, mode=mode)
    for step in range(6):  # trials are among them
        for callee in (module, plain):
            with contextlib.suppress(KeyError):
                callee(batch(step)).square().mean().backward()
        assert all(map(torch.equal, module.buffers(), plain.buffers()))


def test_an_optimizer_may_step_after_a_measured_backward_failed() -> None:
    def fail(_: Tensor) -> None:
        raise ValueError

    model = Net()
    module = framed(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = model.blocks[3].get_parameter("body.0.weight").register_hook(fail)
    with pytest.raises(ValueError):  # noqa: PT011
        module(batch(0)).square().mean().backward()
    hook.remove()
    numbers: list[int] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_, number=number: numbers.append(number))
        for number in range(2)
    ]
    try:
        optimizer.step()  # goes through all hooks, and ends the measurement
    finally:
        for hook in hooks:
            hook.remove()
    assert numbers == [0, 1]
