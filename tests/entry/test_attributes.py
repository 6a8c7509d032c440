"""Attributes that a forward reads or assigns: planned steps do with them what eager does."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_trains_alike, same_gradients
from made_of import made_of
from torch import Tensor, nn

from bench import measure
from rockmate import Planner, RockmateModule, SignatureMismatchError, UnsupportedModelError

Change = Callable[[Any], None]


@made_of(lambda: {"first": nn.Linear(8, 8), "second": nn.Linear(8, 4)})
class Net(nn.Module):
    """Two layers with something between them, which `step` of a subclass decides."""

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(torch.tanh(self.first(x)))).square().mean()


def pair(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    """Eager's copy, and the planned one."""
    eager = copy.deepcopy(model)
    return eager, RockmateModule(model, torch.randn(6, 8), budget=1.0, **options)


def assert_equal_steps(
    eager: Any,
    module: Any,
    changes: Sequence[Change | None] = (None,) * 3,
    loss_of: Callable[..., Tensor] = lambda _, output: output,
    rows: Sequence[int] = (6,) * 6,
) -> None:
    """A step after each change, the same in both."""

    def loss(callee: Any, step: int) -> list[Tensor]:
        if change := changes[step]:
            change(callee)
        output = callee(torch.randn(rows[step], 8))
        return [loss_of(callee, output), output]

    assert_trains_alike(module, eager, loss, len(changes))


class Kind(enum.Enum):
    PLUS, MINUS = 1, -1


@dataclasses.dataclass
class Config:
    flag: bool = False
    sizes: tuple[int, ...] = (1, 2)
    gain: float = 1.0

    def bent(self, h: Tensor) -> Tensor:
        return h * 0.5


class Reading(Net):
    """Each kind of value that can decide."""

    of_class = of_type = 1

    def __init__(self) -> None:
        super().__init__()
        self.flag, self.number, self.text, self.nothing = False, 2, "a", None
        self.factor, self.kind = 0.5, Kind.PLUS
        self.items, self.table = [1, 2], {"a": 1}
        self.config, self.space = Config(), types.SimpleNamespace(depth=1)
        self.configs, self.act = [Config()], torch.relu
        self.array = np.arange(4.0)
        self.slope = 1.0

    def bent(self, h: Tensor) -> Tensor:
        return h * 0.5

    def between(self, h: Tensor) -> Tensor:
        h = self.bent(h)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * self.slope)
        h = -h if self.flag else h
        h = h * self.number * self.factor * self.kind.value * self.of_class
        h = h + len(self.text) + sum(self.items) + self.table["a"] + self.space.depth
        h = h if self.nothing is None else h * 3
        h = self.act(h) + sum(self.config.sizes) * (2 if self.config.flag else 1)
        h = self.config.bent(h * (2 if self.configs[0].flag else 1)) * vars(self.config)["gain"]
        h = h * getattr(self.first.weight, "gain", 1.0) * getattr(self.first.bias, "mask", 1.0)
        return h * getattr(self, "extra", type(self).of_type) + float(self.array[1])


CHANGES: dict[str, Change] = {
    "bool": lambda m: setattr(m, "flag", True),
    "int": lambda m: setattr(m, "number", 3),
    "float": lambda m: setattr(m, "factor", 0.25),
    "str": lambda m: setattr(m, "text", "abc"),
    "none": lambda m: setattr(m, "nothing", 1),
    "enum": lambda m: setattr(m, "kind", Kind.MINUS),
    "list in place": lambda m: m.items.append(7),
    "dict in place": lambda m: m.table.update(a=5),
    "dataclass": lambda m: setattr(m.config, "flag", True),
    "dataclass by vars": lambda m: setattr(m.config, "gain", 3.0),
    "method of a dataclass": lambda m: setattr(m.config, "bent", torch.sigmoid),
    "method of its class": lambda _: setattr(Config, "bent", lambda _, h: h * 2.0),
    "tuple of a dataclass": lambda m: setattr(m.config, "sizes", (5,)),
    "another dataclass": lambda m: setattr(m, "config", Config(True, (3,))),
    "dataclass in a list": lambda m: setattr(m.configs[0], "flag", True),
    "namespace": lambda m: setattr(m.space, "depth", 4),
    "function": lambda m: setattr(m, "act", torch.sigmoid),
    "over a class": lambda m: setattr(m, "of_class", 3),
    "of a class by itself": lambda m: setattr(type(getattr(m, "original", m)), "of_type", 2),
    "added": lambda m: setattr(m, "extra", 3),
    "array in place": lambda m: m.array.fill(2.0),
    "type": lambda m: setattr(m, "number", 2.0),
    "of a parameter": lambda m: setattr(m.first.weight, "gain", 2.0),
    "tensor of a parameter": lambda m: setattr(m.first.bias, "mask", torch.arange(8.0)),
    "read in the backward": lambda m: setattr(m, "slope", 3.0),
    "over a method": lambda m: setattr(m, "bent", torch.sigmoid),
    "over a forward": lambda m: setattr(m.first, "forward", lambda x: x * m.first.bias),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_attribute_that_the_forward_reads_is_planned_for(name: str) -> None:
    torch.manual_seed(0)
    eager, module = pair(Reading())
    own = [(Reading, "of_type", Reading.of_type), (Config, "bent", Config.bent)]

    def of_first(_: Any) -> None:  # both have these classes
        for each in own:
            setattr(*each)

    assert_equal_steps(eager, module, [of_first, CHANGES[name], None])
    of_first(None)


def test_a_value_that_returns_finds_its_plan(caplog: pytest.LogCaptureFixture) -> None:
    eager, module = pair(Reading())
    flip: Change = lambda m: setattr(m, "flag", not m.flag)  # noqa: E731
    assert_equal_steps(eager, module, [None, flip, flip, flip, flip])
    assert len([record for record in caplog.records if "planned for" in record.message]) == 1
    assert "flag of a Reading was False and is True" in caplog.text


def test_attributes_that_the_forward_does_not_read_need_no_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = Reading()
    model.unread, model.rate = [1], 0.1
    eager, module = pair(model)
    assert_equal_steps(
        eager, module, [None, lambda m: setattr(m, "rate", 0.2), lambda m: m.unread.append(2)]
    )
    assert "planned for" not in caplog.text


def test_a_changed_attribute_is_refused_where_nothing_may_be_planned() -> None:
    _, module = pair(Reading(), replan=False)
    module(torch.randn(6, 8)).backward()
    module.flag = True
    with pytest.raises(SignatureMismatchError, match="flag of a Reading was False and is True"):
        module(torch.randn(6, 8))
    module.flag = False
    module(torch.randn(6, 8)).backward()


def test_a_copy_watches_its_own_attributes() -> None:
    eager, module = pair(Reading())
    copied, twin = copy.deepcopy(module), copy.deepcopy(eager)
    copied.original.config.flag = twin.config.flag = True
    assert_equal_steps(eager, module)
    assert_equal_steps(twin, copied)


# --- attributes that the forward assigns ----------------------------------------------------------


class Assigning(Net):
    def between(self, h: Tensor) -> Tensor:
        self.mean = h.mean().detach()
        self.loss, self.shape = h.square().mean(), tuple(h.shape)
        self.parts = {"abs": [h.abs().sum()], "name": "parts"}
        return h


def auxiliary(callee: Any, output: Tensor) -> Tensor:
    return output + 0.1 * callee.loss + 0.01 * callee.parts["abs"][0]


def test_tensors_that_the_forward_assigns_are_delivered() -> None:
    eager, module = pair(Assigning())
    for _ in range(3):
        assert_equal_steps(eager, module, [None])
        assert torch.equal(module.mean, eager.mean)
        assert torch.equal(module.loss, eager.loss)
        assert torch.equal(module.parts["abs"][0], eager.parts["abs"][0])
        assert module.shape == eager.shape == (6, 8)
        assert type(module.mean) is Tensor
        assert not module.mean.requires_grad


def test_tensors_that_the_forward_assigns_have_gradients() -> None:
    eager, module = pair(Assigning())
    assert_equal_steps(eager, module, loss_of=auxiliary)
    assert_equal_steps(eager, module, loss_of=lambda callee, output: callee.loss)
    assert_equal_steps(eager, module)


def test_a_refusal_leaves_the_attributes_of_the_model() -> None:
    class Refused(Assigning):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            self.loss_is_large = loss.item() > 1
            return loss

    model = Refused()
    before = dict(vars(model))
    with pytest.raises(UnsupportedModelError, match="reads the value"):
        RockmateModule(model, torch.randn(6, 8), budget=1.0)
    assert vars(model) == before
    model(torch.randn(6, 8)).backward()


def test_an_attribute_may_be_the_input_or_the_output() -> None:
    class Keeping(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.given = x
            self.hidden = self.first(x)
            self.view = self.hidden.view(-1)
            self.result = super().forward(x)
            self.detached = self.result.detach()
            return self.result

    eager, module = pair(Keeping())
    assert_equal_steps(eager, module)
    for name in ("given", "hidden", "view", "result", "detached"):
        assert torch.equal(getattr(module, name), getattr(eager, name))
    assert_equal_steps(eager, module, loss_of=lambda m, out: out + m.view.sum() + m.hidden.sum())


def test_assigned_sizes_are_those_of_the_call() -> None:
    eager, module = pair(Assigning())
    shapes: dict[int, list[Any]] = {id(eager): [], id(module): []}

    def noting(callee: Any, output: Tensor) -> Tensor:
        shapes[id(callee)].append(callee.shape)
        return auxiliary(callee, output)

    rows = (6, 4, 3, 6, 5, 6)
    assert_equal_steps(eager, module, [None] * 6, noting, rows)
    assert shapes[id(module)] == shapes[id(eager)] == [(each, 8) for each in rows]


def test_only_the_loss_and_what_is_assigned() -> None:
    class WithLogits(Assigning):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.second(self.between(self.first(x)))
            return {"loss": (logits - labels).square().mean(), "logits": logits}

    eager: Any = WithLogits()
    sample = {"x": torch.randn(6, 8), "labels": torch.randn(6, 4)}
    module: Any = RockmateModule(copy.deepcopy(eager), sample, budget=1.0, outputs="loss")
    same_gradients(module, eager, lambda m: (m(**sample)["loss"] + m.loss).backward())
    assert torch.equal(module.mean, eager.mean)


def test_tensors_that_the_forward_assigns_are_within_the_budget() -> None:
    @made_of(lambda: {"layers": nn.ModuleList(nn.Linear(256, 256) for _ in range(6))})
    class Keeping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                x = nn.functional.gelu(layer(x))
                if index == 2:
                    self.hidden, self.parts, self.loss = x.detach(), [2 * x], x.square().mean()
            return x.square().mean()

    model: Any = Keeping()
    x = torch.randn(512, 256)
    planner = Planner(model, x)
    for budget in (planner.minimum_peak_bytes, planner.baseline_peak_bytes):
        module = planner.module(budget)

        def one_step(module: Any = module) -> None:
            (module(x) + model.loss).backward()

        one_step()
        one_step()
        assert measure.allocator_peak(one_step) <= budget


def test_a_table_that_the_first_call_makes_is_made_in_each() -> None:
    @made_of(lambda: {"cached": {}})
    class Caching(Net):
        table: Tensor | None = None

        def between(self, h: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(8.0)
            if h.dtype not in self.cached:
                self.cached[h.dtype] = torch.linspace(0, 1, 8)
            return h * self.table + self.cached[h.dtype]

    eager, module = pair(Caching())
    assert_equal_steps(eager, module)
    assert torch.equal(module.table, eager.table)
    assert module.cached.keys() == eager.cached.keys()
    assert torch.equal(module.cached[torch.float32], eager.cached[torch.float32])


@made_of(lambda: {"losses": [], "cache": {}})
class Collecting(Net):
    """A list that grows, and a cache that is overwritten."""

    def between(self, h: Tensor) -> Tensor:
        self.losses.append(h.square().mean())
        self.cache["last"] = h.detach()
        return h


@pytest.mark.parametrize("name", ["losses", "stacked losses", "shared losses", "cache"])
def test_a_container_that_each_call_adds_to_and_reads_is_refused(name: str) -> None:
    class One(Collecting):
        def between(self, h: Tensor) -> Tensor:
            self.losses.append(h.square().mean())
            if name == "stacked losses":
                return h * torch.stack(self.losses).sum()
            if name == "shared losses":
                return h * len(self.first.losses)
            if name == "cache":
                self.cache[len(self.cache)] = h.detach()
            return h * len(self.losses) if name == "losses" else h

    model = One()
    model.first.losses = model.losses
    read = name.split()[-1]
    with pytest.raises(UnsupportedModelError, match=rf"reads (first\.)?{read}.*self\.{read} = "):
        RockmateModule(model, torch.randn(6, 8), budget=1.0)
    assert (model.losses, model.cache) == ([], {})


def test_the_advice_for_a_container_leads_to_a_run() -> None:
    class Renewing(Collecting):
        def between(self, h: Tensor) -> Tensor:
            self.losses, self.cache = [], {}
            h = super().between(h)
            return h + torch.stack(self.losses).sum()

    eager, module = pair(Renewing())
    assert_equal_steps(eager, module)
    assert torch.equal(module.cache["last"], eager.cache["last"])


def test_containers_that_are_only_added_to_have_the_tensors_of_each_step() -> None:
    eager, module = pair(Collecting())
    collected: Callable[..., Tensor] = lambda m, out: out + sum(m.losses[-1:])  # noqa: E731
    assert_equal_steps(eager, module, loss_of=collected)
    assert len(module.losses) == 3
    assert all(map(torch.equal, module.losses, eager.losses))
    assert torch.equal(module.cache["last"], eager.cache["last"])


class Shared(Net):
    """Sets items of a list that a submodule has, too, as a 3D network of a library does."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.cache = [torch.zeros(1)] * 2, {}
        self.first.found = self.found

    def between(self, h: Tensor) -> Tensor:
        self.first.found[-1], self.first.found[0] = h * 2, h.detach()
        self.cache["last"] = h * 3
        h = h * sum(each.square() for each in self.found) + self.found[1]
        return h + self.cache["last"] * torch.stack(self.found).sum()


def test_items_that_a_forward_sets_before_it_reads_them() -> None:
    eager, module = pair(Shared())
    assert_equal_steps(eager, module)
    assert all(map(torch.equal, module.found, eager.found))
    assert torch.equal(module.cache["last"], eager.cache["last"])


class Owner:
    """An object around a model that refers to it, as trainers and loggers do."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.owner, self.scale = net, self, 2.0


def test_objects_and_containers_may_contain_themselves() -> None:
    class Cyclic(Net):
        def __init__(self) -> None:
            super().__init__()
            self.owner = Owner(self)
            self.ring: list[Any] = [1.0]
            self.ring.append(self.ring)

        def between(self, h: Tensor) -> Tensor:
            self.current = self.owner
            self.first_ring = self.ring if h.ndim > 3 else None
            return h * self.owner.scale * self.ring[0]

    eager, module = pair(Cyclic())
    assert_equal_steps(eager, module, [None, lambda m: setattr(m.owner, "scale", 3.0)])
    assert module.current is module.owner


# --- attributes that the forward reads and changes ------------------------------------------------


@made_of(lambda: {"calls": 3})
class Counting(Net):
    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.used()

    def used(self) -> float:
        return 1.0


class Used(Counting):
    def used(self) -> float:
        return 1.0 if self.calls % 100 else 2.0


class Listed(Counting):
    def between(self, h: Tensor) -> Tensor:
        vars(self)["calls"] += 1
        return h


@pytest.mark.parametrize("cls", [Counting, Used, Listed])
def test_a_counter_is_refused(cls: type[Counting]) -> None:
    model = cls()
    before = dict(vars(model))
    with pytest.raises(
        UnsupportedModelError, match=rf"reads calls of a {cls.__name__} .*3 -> 4.*register_buffer"
    ):
        RockmateModule(model, torch.randn(6, 8), budget=1.0)
    assert vars(model) == before


@made_of(lambda: {"linear": nn.Linear(8, 8), "last": 0.0, "calls": 0})
class Memory(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        h = self.linear(h) + self.last / self.calls
        self.last = h.mean().detach()
        return h


@made_of(lambda: {"memory": Memory()})
class Remembering(Net):
    def between(self, h: Tensor) -> Tensor:
        return self.memory(h)


@pytest.mark.parametrize("budget", [1.0, 0.85])
def test_a_submodule_with_state_runs_opaque(budget: float) -> None:
    model = Remembering()
    eager = copy.deepcopy(model)
    module = RockmateModule(model, torch.randn(6, 8), budget=budget, untraced=["memory"])
    assert model.memory.calls == 0
    assert_equal_steps(eager, module)
    assert model.memory.calls == eager.memory.calls == 3


def test_a_flag_of_the_first_call_is_set_by_it(caplog: pytest.LogCaptureFixture) -> None:
    @made_of(lambda: {"warned": {}, "given": False})
    class Warning(Net):
        def between(self, h: Tensor) -> Tensor:
            self.given = True if not self.given else self.given
            if "shape" not in self.warned:
                self.warned["shape"] = True
            return h

    eager, module = pair(Warning())
    assert not module.given
    assert_equal_steps(eager, module)
    assert module.given
    assert module.warned == eager.warned == {"shape": True}
    assert "planned for" not in caplog.text


def test_what_only_the_first_call_leaves_is_left_once() -> None:
    @made_of(lambda: {"notes": [], "is_noted": False})
    class Noting(Net):
        def between(self, h: Tensor) -> Tensor:
            if not self.is_noted:
                self.is_noted = True
                self.notes.append("first")
                self.first_mean = h.mean().detach()
            return h

    eager, module = pair(Noting())
    assert_equal_steps(eager, module)
    assert module.notes == eager.notes == ["first"]
    assert torch.equal(module.first_mean, eager.first_mean)


# --- models that change themselves in their first call --------------------------------------------


@made_of(lambda linear, factor: {"linear": linear, "factor": factor})
class Scaled(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h) * self.factor


@made_of(lambda: {"part": Scaled(nn.Linear(8, 8), 2.0), "norm": nn.BatchNorm1d(8)})
class Switching(Net):
    """Replaces a submodule if it is called with few rows, as some attention layers do."""

    is_small = False

    def between(self, h: Tensor) -> Tensor:
        if len(h) < 16 and not self.is_small:
            self.is_small = True
            self.part = Scaled(self.part.linear, 3.0)
        return self.norm(self.part(h))


def test_a_model_that_replaces_a_submodule_is_planned_as_it_is_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    eager, module = pair(Switching())
    assert_equal_steps(eager, module)
    assert module.is_small
    assert module.part.factor == eager.part.factor == 3.0
    assert torch.equal(module.norm.running_mean, eager.norm.running_mean)
    assert "puts submodules in place" in caplog.text
    with pytest.raises(
        UnsupportedModelError, match="Run the plain model once before it is planned"
    ):
        Planner(Switching(), torch.randn(6, 8))


def test_buffers_that_an_op_sizes_in_the_first_call() -> None:
    """As in quantization-aware training. What trials have looked at can still be resized."""

    class Observed(Net):
        def between(self, h: Tensor) -> Tensor:
            sized = self.low, self.high, self.scale, self.zero
            return torch.fused_moving_avg_obs_fake_quant(
                h, self.on, self.on, *sized, 0.1, -128, 127, 0, True, True
            )

    model = Observed()
    for name, size in {"on": 1, "low": 0, "high": 0, "scale": 1, "zero": 1}.items():
        kind = {"on": torch.long, "zero": torch.int32}.get(name, torch.float32)
        model.register_buffer(name, torch.ones(size, dtype=kind))
    eager, module = pair(model)
    with pytest.raises(UnsupportedModelError, match="run the plain model once"):
        module(torch.randn(6, 8))
    for each in (eager, module.original):
        each(torch.ones(6, 8))
    assert_equal_steps(eager, module)
    assert all(each.untyped_storage().resizable() for each in module.state_dict().values())


def test_a_refusal_restores_replaced_submodules() -> None:
    class Refused(Switching):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            return loss if loss.item() > 0 else -loss

    model = Refused()
    part = model.part
    with pytest.raises(UnsupportedModelError, match="reads the value"):
        RockmateModule(model, torch.randn(6, 8), budget=1.0)
    assert model.part is part
    assert not model.is_small


def test_a_submodule_that_is_replaced_in_each_call_is_refused() -> None:
    class Restless(Switching):
        def between(self, h: Tensor) -> Tensor:
            self.part = Scaled(self.part.linear, 3.0)
            return self.part(h)

    model = Restless()
    module = RockmateModule(model, torch.randn(6, 8), budget=1.0)
    module(torch.randn(6, 8))
    part = model.part
    with pytest.raises(UnsupportedModelError, match="another submodule at part"):
        module(torch.randn(6, 8))
    assert model.part is part


def test_an_attribute_that_is_an_op() -> None:
    """The schema of an op is an object of C++, whose class cannot be made to record."""

    @made_of(lambda: {"op": torch.ops.aten.gelu.default})
    class WithOp(Net):
        def between(self, h: Tensor) -> Tensor:
            return self.op(h)

    assert_equal_steps(*pair(WithOp()))


def test_an_assigned_forward_is_the_modules_where_the_model_has_one_of_its_own() -> None:
    # As accelerate's mixed precision assigns one. In the model it would call the module, and that
    # the model.
    model = nn.Linear(4, 4)
    own = model.forward
    model.forward = lambda x: own(x) * 2
    module = RockmateModule(model, torch.ones(2, 4), 1.0)
    given = module.forward
    module.forward = lambda x: given(x) + 1
    assert torch.equal(module(torch.ones(2, 4)), own(torch.ones(2, 4)) * 2 + 1)
