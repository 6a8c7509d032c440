"""Plans of models whose parameters are no plain tensors: eager's bits, the predicted peak.

`Scaled` is a parameter like bitsandbytes' `Params4bit`, written here: a class with attributes that
the layer's forward reads, and no way to take it apart. It needs no other library.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import REGIMES, assert_same_steps, budget_for, differing, one_step, train
from made_of import made_of
from torch import Tensor, nn

from bench.measure import allocator_peak
from rockmate import Plan, PlanMismatchError, Planner, RockmateModule, UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore")  # of torchao and bitsandbytes, when imported

WIDTH, NUM_ROWS = 32, 64


class State:
    """What a quantized weight is read with."""

    def __init__(self, scale: Tensor, inner: State | None = None) -> None:
        self.scale, self.inner, self.num_bits = scale, inner, 8


class Scaled(nn.Parameter):
    """Integers as a parameter; the scale of each row is itself quantized."""

    state: State

    def __new__(cls, integers: Tensor, state: State) -> Scaled:
        made = torch.Tensor._make_subclass(cls, integers, False)
        made.state = state
        return made  # pyright: ignore

    def __deepcopy__(self, memo: dict[int, Any]) -> Scaled:
        return Scaled(self.data.clone(), copy.deepcopy(self.state, memo))


class ScaledLinear(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        whole = scale.max() / 255
        state = State((scale / whole).round().to(torch.uint8), State(whole))
        self.weight = Scaled((layer.weight.detach() / scale).round().to(torch.int8), state)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.state
        assert state.inner is not None
        scale = state.scale.to(x.dtype) * state.inner.scale
        return nn.functional.linear(x, self.weight.to(x.dtype) * scale, self.bias)


def by_attributes(layer: nn.Linear) -> nn.Module:
    return ScaledLinear(layer)


def by_bitsandbytes(layer: nn.Linear, **options: Any) -> nn.Module:
    modules: Any = pytest.importorskip("bitsandbytes").nn
    quantized = modules.Linear4bit(
        layer.in_features, layer.out_features, compute_dtype=torch.float32, **options
    )
    quantized.load_state_dict(layer.state_dict())
    return quantized.to("cpu")


def by_nf4(layer: nn.Linear) -> nn.Module:
    return by_bitsandbytes(layer, quant_type="nf4", compress_statistics=True)


def by_fp4(layer: nn.Linear) -> nn.Module:
    return by_bitsandbytes(layer, quant_type="fp4", compress_statistics=False)


def by_nf4_of_torchao(layer: nn.Linear) -> nn.Module:
    quantization: Any = pytest.importorskip("torchao.quantization")
    quantized = quantization.to_nf4(layer.weight.detach(), 64, 64)
    layer.weight = nn.Parameter(quantized, requires_grad=False)
    layer.bias = None  # pyright: ignore
    return layer


def by_int8_of_bitsandbytes(layer: nn.Linear) -> nn.Module:
    modules: Any = pytest.importorskip("bitsandbytes").nn
    quantized = modules.Linear8bitLt(layer.in_features, layer.out_features, has_fp16_weights=False)
    quantized.load_state_dict(layer.state_dict())
    return quantized.to("cpu")


def by_torchao(layer: nn.Linear, config: str, **options: Any) -> nn.Module:
    quantization: Any = pytest.importorskip("torchao.quantization")
    quantization.quantize_(layer, getattr(quantization, config)(**options))
    return layer


def by_int8(layer: nn.Linear) -> nn.Module:
    return by_torchao(layer, "Int8WeightOnlyConfig")


def by_float8(layer: nn.Linear) -> nn.Module:
    return by_torchao(layer, "Float8WeightOnlyConfig")


def by_intx(layer: nn.Linear) -> nn.Module:
    return by_torchao(layer, "IntxWeightOnlyConfig")


def by_int4(layer: nn.Linear) -> nn.Module:
    group = pytest.importorskip("torchao.quantization").PerGroup(32)
    return by_torchao(layer, "IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=group)


Quantized = Callable[[nn.Linear], nn.Module]
ALL = (
    by_attributes, by_nf4, by_fp4, by_nf4_of_torchao, by_int8_of_bitsandbytes, by_int8, by_float8,
    by_intx, by_int4,
)  # fmt: skip
ONE_OF_EACH_KIND = (by_attributes, by_nf4, by_int8)


class Adapted(nn.Module):
    """A frozen quantized layer with a LoRA beside it."""

    def __init__(self, quantized: Quantized, inner: int, outer: int) -> None:
        super().__init__()
        self.frozen = quantized(nn.Linear(inner, outer)).requires_grad_(False)
        self.down, self.up = nn.Linear(inner, 4, bias=False), nn.Linear(4, outer, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(self.drop(x)))


class Block(nn.Module):
    def __init__(self, quantized: Quantized, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = Adapted(quantized, width, 4 * width)
        self.back = Adapted(quantized, 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(nn.functional.gelu(self.wide(self.norm(x))))


def model_of(quantized: Quantized, *, width: int = WIDTH, num_blocks: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(quantized, width) for _ in range(num_blocks)))


def loss_of(module: Any, step: int, *, num_rows: int = NUM_ROWS) -> tuple[None, Tensor]:
    x = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(step))
    # Outside the module, since the loss of a module may run in chunks, which add in another order.
    return None, module(x).square().mean()


def assert_as_eager(module: RockmateModule, plain: nn.Module, **options: Any) -> None:
    """One step from one random state; the plain model's gradients are those of the planned one."""
    found = []
    for each, owner in ((module, module.original), (plain, plain)):
        owner.zero_grad()
        found.append(one_step(each, owner, lambda m, s: loss_of(m, s, **options), 7))
    assert torch.equal(found[0].loss, found[1].loss)
    assert found[1].gradients
    assert not differing(found[0].gradients, found[1].gradients)


@pytest.mark.parametrize("quantized", ALL)
def test_trains_as_eager(quantized: Quantized) -> None:
    """Three steps of AdamW with dropout, at three budgets down to the least."""
    sample = torch.randn(NUM_ROWS, WIDTH)
    plain = model_of(quantized)  # not a copy: one of torchao's NF4 is quantized once more
    keys, reference = list(plain.state_dict()), train(plain, plain, loss_of)
    for regime in REGIMES:
        own = model_of(quantized)
        planner = Planner(own, sample)
        module = planner.module(budget_for(planner, regime))
        assert_same_steps(train(module, own, loss_of), reference)
        assert list(own.state_dict()) == list(module.state_dict()) == keys


@pytest.mark.parametrize("quantized", ONE_OF_EACH_KIND)
def test_frozen_tensors_are_inputs_of_the_graph(quantized: Quantized) -> None:
    """No quantized number is a constant of the plan, and none counts as memory of a step."""
    planner = Planner(model_of(quantized, num_blocks=1), torch.randn(NUM_ROWS, WIDTH))
    snapshot = planner.plan(1.0).snapshot
    inputs = [name for name, _ in snapshot.inputs]
    expected = {
        by_attributes: ["weight", "weight.state.scale", "weight.state.inner.scale"],
        by_nf4: ["weight", "weight.quant_state.absmax", "weight.quant_state.state2.absmax"],
        by_int8: ["weight.qdata", "weight.scale"],
    }[quantized]
    for name in expected:
        assert any(each.endswith(f"0.wide.frozen.{name}") for each in inputs), (name, inputs)
    assert not any(name.startswith("constant") for name in inputs)


@pytest.mark.parametrize("quantized", [*ONE_OF_EACH_KIND, by_nf4_of_torchao])
def test_the_measured_peak_is_the_predicted_one(quantized: Quantized) -> None:
    check_peak(model_of(quantized, width=128))


def check_peak(model: nn.Module) -> None:
    """Of a model of width 128, at a budget between the smallest and the largest peak."""
    x = torch.randn(512, 128)
    planner = Planner(model, x)
    middle = (planner.minimum_peak_bytes + planner.baseline_peak_bytes) // 2
    module = planner.module(middle)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        output = module(x)
        output.backward(torch.ones_like(output))
        del output

    step()
    measured = allocator_peak(step)
    assert module.plan.baseline_peak_bytes > 2_000_000, "too small to measure"
    assert measured <= middle
    assert abs(module.plan.predicted_peak_bytes / measured - 1) <= 0.02


@pytest.mark.parametrize("quantized", ONE_OF_EACH_KIND)
def test_a_plan_file(quantized: Quantized, tmp_path: Path) -> None:
    model, x = model_of(quantized), torch.randn(NUM_ROWS, WIDTH)
    Planner(model, x).plan(0.7).save(tmp_path / "plan.json")
    plan, twin = Plan.load(tmp_path / "plan.json"), copy.deepcopy(model)
    assert_as_eager(RockmateModule(twin, x, plan=plan), model)
    with pytest.raises(PlanMismatchError, match=r"weight.* in the plan and .* in this model"):
        RockmateModule(model_of(by_float8 if quantized is not by_int8 else by_attributes), x,
                       plan=plan)  # fmt: skip


def test_other_weights_in_the_same_places() -> None:
    """What is held in attributes is read in each call; another kind of it is planned for anew."""
    model = model_of(by_attributes)
    module = RockmateModule(model, torch.randn(NUM_ROWS, WIDTH), 0.8)
    weight: Any = model[0].wide.frozen.weight  # pyright: ignore
    weight.state.scale = weight.state.scale // 2
    assert_as_eager(module, copy.deepcopy(model))
    assert len(module._plans.runnables) == 1
    weight.state.scale = weight.state.scale.float()
    assert_as_eager(module, copy.deepcopy(model))
    assert len(module._plans.runnables) == 2
    weight.state.num_bits = 7
    assert module._plans.runnables[0].planned.state.difference(
        type(module._plans.runnables[0].planned.state).of(model)
    )


@pytest.mark.parametrize("quantized", [by_attributes, by_int8])
def test_moved_to_another_dtype(quantized: Quantized) -> None:
    model = model_of(quantized)
    module = RockmateModule(model, torch.randn(NUM_ROWS, WIDTH), 0.8)
    for each in (model[0].norm, model[0].wide.down):  # pyright: ignore
        each.to(torch.float64).to(torch.float32)
    assert_as_eager(module, copy.deepcopy(model))
    model[0].wide.frozen = quantized(nn.Linear(WIDTH, 4 * WIDTH)).requires_grad_(False)  # pyright: ignore
    assert_as_eager(module, copy.deepcopy(model))
    assert len(module._plans.runnables) == 2


@pytest.mark.parametrize("quantized", ONE_OF_EACH_KIND)
def test_inside_an_opaque_module(quantized: Quantized) -> None:
    model = model_of(quantized, num_blocks=2)
    plain = copy.deepcopy(model)
    module = RockmateModule(
        model, torch.randn(NUM_ROWS, WIDTH), 0.8, untraced=["0.wide.frozen", "1"],
        on_infeasible="least",
    )  # fmt: skip
    assert_as_eager(module, plain)


def test_trained_wrappers() -> None:
    """Weights that stay quantized in training: gradients and updates of their class, as eager's."""
    training: Any = pytest.importorskip("torchao.prototype.quantized_training")
    quantization: Any = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(),
        nn.Linear(64, WIDTH),
    )  # fmt: skip
    quantization.quantize_(model, training.int8_weight_only_quantized_training())
    assert all(map(torch.equal, steps_of(model, None), steps_of(model, "binding")))
    assert all(map(torch.equal, steps_of(model, None), steps_of(model, "minimum")))


@pytest.mark.parametrize("emulates", [False, True])
def test_float8_training(emulates: bool) -> None:
    """Operands of products in float8, forward and backward: eager's bits and the predicted peak."""
    float8: Any = pytest.importorskip("torchao.float8")

    def converted(width: int) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        model = nn.Sequential(*copy.deepcopy(layers), nn.Dropout(0.1), *layers)
        return float8.convert_to_float8_training(
            model, config=float8.Float8LinearConfig(emulate=emulates)
        )

    plain = converted(WIDTH)
    assert all(type(plain[index]).__name__ == "Float8Linear" for index in (0, 2))  # pyright: ignore
    reference = train(plain, plain, loss_of)
    for regime in REGIMES:
        own = converted(WIDTH)
        planner = Planner(own, torch.randn(NUM_ROWS, WIDTH), numerics="bitwise")
        module = planner.module(budget_for(planner, regime))
        assert_same_steps(train(module, own, loss_of), reference)
    check_peak(converted(128))


def steps_of(model: nn.Module, regime: str | None) -> list[Tensor]:
    """Losses, gradients and integers of three steps of a copy, planned or not."""
    own: Any = copy.deepcopy(model)
    module = own
    if regime is not None:
        planner = Planner(own, torch.randn(NUM_ROWS, WIDTH))
        module = planner.module(budget_for(planner, regime))
    found, optimizer = [], torch.optim.SGD(own.parameters(), lr=1e-2)
    for index in range(3):
        step = one_step(module, own, loss_of, index)
        torch.manual_seed(index)  # of stochastic rounding
        optimizer.step()
        found += [step.loss, *step.gradients.values()]
        found += [own[0].weight.int_data.clone(), own[3].weight.int_data.clone()]
        optimizer.zero_grad()
    assert len(found) == 3 * (1 + 6 + 2)
    return found


class Reader(nn.Module):
    """Reads quantized weights that are a buffer, written to in the forward, and an input."""

    def __init__(self, weight: Tensor, other: Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("weight", weight)
        self.register_buffer("other", other)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        x = nn.functional.linear(self.first(x), self.weight).tanh()  # pyright: ignore
        x = nn.functional.linear(x, given)
        self.other.copy_(self.weight)  # pyright: ignore
        return x


def test_buffers_and_inputs() -> None:
    weights = [by_int8(nn.Linear(WIDTH, WIDTH)).weight.detach() for _ in range(3)]  # pyright: ignore
    model, x = Reader(*weights[:2]), torch.randn(NUM_ROWS, WIDTH)  # pyright: ignore
    plain = copy.deepcopy(model)
    assert not torch.equal(weights[0].qdata, weights[1].qdata)  # pyright: ignore
    module = RockmateModule(model, (x, weights[2]), 0.9, on_infeasible="least")
    for each in (module, plain):
        each(x, weights[2]).square().mean().backward()
    for name in ("qdata", "scale"):
        assert torch.equal(getattr(model.other, name), getattr(plain.other, name))
        assert torch.equal(getattr(model.other, name), getattr(weights[0], name))
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)  # pyright: ignore
    other = by_float8(nn.Linear(WIDTH, WIDTH)).weight.detach()  # pyright: ignore
    assert torch.equal(module(x, other), plain(x, other))  # is planned for


def test_with_gradients_returned() -> None:
    """`torch.autograd.grad` gets gradients of a trained wrapper."""
    training: Any = pytest.importorskip("torchao.prototype.quantized_training")
    quantization: Any = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    quantization.quantize_(model, training.int8_weight_only_quantized_training())
    module = RockmateModule(model, torch.randn(NUM_ROWS, WIDTH), 1.0, gradients="returned")
    ours, theirs = (
        torch.autograd.grad(loss_of(each, 1)[1], list(model.parameters()))
        for each in (module, model)
    )
    assert all(map(torch.equal, ours, theirs))


def test_for_a_machine_that_is_not_here() -> None:
    x = torch.randn(NUM_ROWS, WIDTH)
    assert Planner(model_of(by_int8), x, machine="h100").plan(0.7).predicted_ratio > 1
    with pytest.raises(UnsupportedModelError, match=r"class Scaled.* machine itself"):
        Planner(model_of(by_attributes), x, machine="h100")


@made_of(lambda: {"layer": nn.Linear(8, 8)})
class Padded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).to_padded_tensor(0.0).square().mean()


def test_nested_tensors_are_refused_by_name() -> None:
    rows = [torch.randn(length, 8) for length in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    model = Padded()
    with pytest.raises(UnsupportedModelError, match=r'0 of the call is a nested .*mode="frames"'):
        RockmateModule(model, nested, 1.0)
    model(nested).backward()
    expected = model.layer.weight.grad
    model.zero_grad()
    RockmateModule(model, None, 1.0, mode="frames")(nested).backward()
    assert expected is not None
    assert model.layer.weight.grad is not None
    assert torch.equal(model.layer.weight.grad, expected)
