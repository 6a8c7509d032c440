"""Models of unusual parts: planned as eager's, or refused with advice that works."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_gradients_alike, assert_same, assert_trains_alike, same_gradients, train
from made_of import made_of
from torch import Tensor, nn

from rockmate import InvalidSampleError, Planner, RockmateModule, UnsupportedModelError
from rockmate.state.writes import OutOfBudget, Writes

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


@made_of(lambda: {"body": nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))})
class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@made_of(lambda: {"blocks": nn.ModuleList(Block() for _ in range(3))})
class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Missing:
    def __getattr__(self, name: str) -> Any:
        raise ImportError(name)  # as what stands for an optional package


@made_of(lambda: {"norm": nn.GroupNorm(4, 16)})
class GroupNormOnInput(Net):
    missing = Missing()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@made_of(lambda: {"edges": nn.Buffer(torch.eye(3).to_sparse())})
class SparseBuffer(Net):
    pass


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * (2 if scale.item() > 5 else 1) * scale


@made_of(lambda: {"scale": nn.Parameter(torch.tensor(1.5)), "scaled": Scaled()})
class ScaledByScalar(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(super().forward(x), self.scale * 2)


def same_steps(module: Any, plain: nn.Module, call: Callable[[Any, int], Tensor]) -> None:
    """Three steps of mean squares, bit for bit."""
    assert_trains_alike(module, plain, lambda m, step: call(m, step).square().mean(), 3)


@pytest.mark.parametrize(
    ("make", "options"),
    [(GroupNormOnInput, {}), (SparseBuffer, {}), (ScaledByScalar, {"untraced": ["scaled"]})],
)
def test_bit_for_bit(make: type[Net], options: dict[str, Any]) -> None:
    model = make()
    plain = copy.deepcopy(model)
    module = RockmateModule(model, X, 0.9, on_infeasible="least", numerics="bitwise", **options)
    same_steps(module, plain, lambda each, step: each(X[: 64 - step]))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_buffer_in_a_compressed_layout() -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    model.register_buffer("rows", torch.eye(3).to_sparse_csr())
    module = RockmateModule(model, X, 0.9, on_infeasible="least", numerics="bitwise")
    for each in (module, plain, module, plain):
        each(X).sum().backward()
    assert_gradients_alike(model, plain)


class Adjacent(Net):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return super().forward(edges @ x)


def test_a_sparse_input_is_refused_in_words_and_auto_takes_frames() -> None:
    model, edges = Adjacent(), torch.eye(64).to_sparse()
    with pytest.raises(UnsupportedModelError, match="reads input 1, a tensor of layout"):
        Planner(model, (X, edges))
    module = RockmateModule(model, (X, edges), 0.9, mode="auto", on_infeasible="least")
    same_steps(module, copy.deepcopy(model), lambda each, _: each(X, edges))


@pytest.mark.parametrize("sample", [None, X])
@pytest.mark.parametrize("mode", ["plan", "auto", "frames"])
def test_lazy_modules_are_planned_after_the_call_that_makes_them(
    mode: Any, sample: Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rockmate")

    def made() -> nn.Module:
        first = nn.Sequential(nn.Sequential(nn.LazyLinear(16), nn.Dropout(0.1)), nn.Tanh())
        return nn.Sequential(first, Net(), nn.LazyBatchNorm1d())

    model = made()
    plain = made()
    plain.load_state_dict(model.state_dict())
    options = {} if mode == "frames" else {"numerics": "bitwise"}
    module = RockmateModule(model, sample, 0.9, on_infeasible="least", mode=mode, **options)
    same_steps(module, plain, lambda each, _: each(X))
    assert module.is_planned == (mode != "frames")
    assert sum("lazy modules" in each for each in caplog.messages) == 1


def test_lazy_modules_that_have_not_run_are_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(16), Net())
    with pytest.raises(InvalidSampleError, match=r"0\.weight belongs to a lazy module"):
        Planner(model, X)


@made_of(lambda inner: {"inner": inner})
class Around(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@made_of(lambda: {"layer": nn.Linear(16, 16), "scale": nn.Buffer(torch.full((16,), 1.5))})
class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * x + self.scale


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:`torch.jit")
@pytest.mark.parametrize(
    ("options", "tolerance"), [({}, 1e-5), ({"untraced": ["1"]}, 0), ({"mode": "frames"}, 0)]
)
def test_torchscript_is_traced_op_by_op(options: dict[str, Any], tolerance: float) -> None:
    model = nn.Sequential(Net(), Around(torch.jit.script(Scripted())), Net())
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def loss_of(callee: Any, _: int) -> tuple[Tensor, Tensor]:
        output = callee(X)
        return output, output.square().mean()

    def steps(callee: Any) -> list[Any]:
        model.load_state_dict(start)
        return train(callee, model, loss_of)

    for _ in range(2):  # its first runs are compiled otherwise than later ones
        theirs = steps(model)
    module = RockmateModule(model, X, 0.9, on_infeasible="least", **options)
    assert module.is_planned == (options != {"mode": "frames"})
    for mine, eager in zip(steps(module), theirs, strict=True):
        if not tolerance:
            assert_same(mine, eager)
        assert torch.allclose(mine.loss, eager.loss, rtol=tolerance)
        assert mine.gradients.keys() == eager.gradients.keys()
        for name, gradient in eager.gradients.items():
            assert torch.allclose(mine.gradients[name], gradient, rtol=tolerance, atol=tolerance)


class Gradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler._is_compiling_flag:  # as a library of force fields has it
            x = x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).tanh().sum(), x, create_graph=True)[0]


class Told(Net):
    def forward(self, x: Tensor) -> Tensor:
        is_empty = not torch.compiler.is_compiling() and not x.data_ptr()
        return x if is_empty else super().forward(x)


TABLE = torch.linspace(0.5, 1.5, 16)


class Unregistered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.order, self.number = [torch.arange(15, -1, -1)], torch.tensor(2.0)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("zero", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)[:, self.order[0]].sin()[:, self.order[0]] * TABLE[None]
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        loss = self.zero
        loss.requires_grad_()  # as a quantizer has it
        return x * 2 + loss * 3 if self.number > 1 else x + self.mean


class Partly:
    """As a graph of a library, copies some of its attributes."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.more = x, {"x": x * 2}

    def __deepcopy__(self, memo: dict[int, Any]) -> Partly:
        copied = copy.copy(self)
        copied.x = copy.deepcopy(self.x, memo)
        return copied


class OfObject(Net):
    def forward(self, graph: Partly) -> Tensor:
        return super().forward(graph.x) + graph.more["x"]


@pytest.mark.parametrize(
    ("make", "arguments"), [(Gradient, X), (Unregistered, X), (OfObject, Partly(X)), (Told, X)]
)
def test_what_libraries_do(make: type[Net], arguments: Any) -> None:
    model = make()
    plain = copy.deepcopy(model)
    module = RockmateModule(model, (arguments,), 0.9, on_infeasible="least", numerics="bitwise")
    same_steps(module, plain, lambda each, step: each(arguments))
    if make is not Unregistered:
        return
    assert torch.equal(model.zero.grad, plain.zero.grad)
    assert torch.equal(model.mean, plain.mean)
    for each in (model, plain, twin := copy.deepcopy(module)):
        each.number.fill_(0.0)
        each.order[0].copy_(torch.arange(16))
    assert twin.original.order[0] is not model.order[0]
    for each in (module, twin):
        each.zero_grad()
        same_steps(each, copy.deepcopy(plain), lambda each, step: each(arguments))


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        (TABLE.clone().requires_grad_(), lambda _: None, "requires a gradient and is neither"),
        (TABLE.clone(), lambda table: table.add_(1), "changes a tensor in place that is neither"),
    ],
)
def test_unregistered_tensors_that_are_not_constant(
    table: Tensor, change: Callable[[Tensor], Any], message: str
) -> None:
    class Reading(Net):
        def forward(self, x: Tensor) -> Tensor:
            change(table)
            return super().forward(x) * table

    with pytest.raises(UnsupportedModelError, match=message):
        RockmateModule(Reading(), X, 0.9)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:`torch.jit")
def test_a_script_that_passes_the_budget_of_a_trial_ends_it() -> None:
    script = torch.jit.script(Scripted())
    with pytest.raises(OutOfBudget), Writes(most_bytes=64).noted():
        script(X)


def test_the_size_of_what_an_op_makes_is_known_without_drawing() -> None:
    found = []
    for writes in (Writes(), Writes(most_bytes=1000, largest_bytes=1024)):
        torch.manual_seed(0)
        with writes.noted():
            found.append(torch.rand(16))
    assert torch.equal(*found)
    before = torch.get_rng_state()
    with Writes(most_bytes=1000).noted():
        torch.zeros(2, 2, layout=torch.sparse_coo)  # which has no memory of its own to be asked for
    with pytest.raises(OutOfBudget), Writes(most_bytes=1000).noted():
        torch.rand(4096)
    assert torch.equal(torch.get_rng_state(), before)


BETWEEN_STEPS = np.random.default_rng(4)


def test_the_script_draws_from_a_generator_between_steps() -> None:
    module = RockmateModule(Net(), X, 0.9)
    for _ in range(2):
        x = torch.from_numpy(BETWEEN_STEPS.random((64, 16), np.float32))
        module(x).square().mean().backward()


def test_parameters_are_swapped_between_steps() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    module = RockmateModule(model, X[:, :3], 0.9, on_infeasible="least")
    for _ in range(2):
        for each, owner in ((module, model), (plain, plain)):
            each.zero_grad()
            each(X[:, :3]).square().mean().backward()
            weight: Any = owner[0].weight
            torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2))
            assert weight is owner[0].weight
    module(X[:, :3]).square().mean().backward()
    plain(X[:, :3]).square().mean().backward()
    assert_gradients_alike(model, plain)


def test_a_weight_is_the_product_of_a_vector() -> None:
    @made_of(lambda: {"body": nn.Linear(16, 64), "made": nn.Linear(64, 4096)})
    class Hyper(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x).tanh()
            return (hidden @ self.made(hidden.mean(0)).view(64, 64)).square().mean()

    plain = Hyper()
    module = RockmateModule(copy.deepcopy(plain), X, 0.9, numerics="bitwise", on_infeasible="least")
    same_gradients(module, plain, lambda each: each(X).backward())
