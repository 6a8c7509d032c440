"""Tensors inside of tensors: which there are, what stands for them in a trace, what is refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_of import made_of
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from rockmate import RockmateModule, UnsupportedModelError
from rockmate.capture.forward_attributes import NO_ATTRIBUTES
from rockmate.capture.model_signature import ModelSignature, ModelWatch
from rockmate.capture.signature import TensorSignature
from rockmate.capture.tensor_parts import (
    HeldTensors,
    description,
    has_attributes,
    has_parts,
    inner_tensors,
    plain_places,
)
from rockmate.capture.wrapping import Wrapping


class Named(nn.Parameter):
    """A parameter with attributes, and a property of its class."""

    @property
    def doubled(self) -> Tensor:
        return self * 2


def named(**attributes: Any) -> Any:
    made: Any = torch.Tensor._make_subclass(Named, torch.arange(4.0), False)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def two(width: int = 4) -> TwoTensor:
    torch.manual_seed(0)
    return TwoTensor(torch.randn(width, width), torch.randn(width, width))


class TestParts:
    def test_of_a_plain_tensor(self) -> None:
        for tensor in (torch.ones(2), nn.Parameter(torch.ones(2))):
            assert not has_parts(tensor)
            assert inner_tensors(tensor) == {}
            assert TensorSignature.of(tensor).parts == ()

    def test_of_a_wrapper_of_wrappers(self) -> None:
        inner = two()
        outer = TwoTensor(inner, two())
        found = inner_tensors(outer)
        assert list(found) == [("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]
        assert found["a", "b"] is inner.b
        assert not has_attributes(outer)

    def test_of_a_class_with_attributes(self) -> None:
        scale, deep = torch.ones(2), torch.zeros(3)
        state = SimpleNamespace(inner=SimpleNamespace(deep=deep, bits=4), name="nf4")
        tensor = named(scale=scale, state=state, module=nn.Linear(2, 2), function=len)
        found = inner_tensors(tensor)
        assert set(found) == {("scale",), ("state", "inner", "deep")}
        assert found["state", "inner", "deep"] is deep
        assert "'bits': 4" in description(tensor)
        assert "Linear" not in description(tensor)

    def test_a_signature_tells_a_change_inside(self) -> None:
        tensor = named(scale=torch.ones(2), bits=4)
        before = TensorSignature.of(tensor)
        tensor.scale = torch.zeros(2)
        assert TensorSignature.of(tensor) == before
        tensor.scale = torch.zeros(3)
        assert TensorSignature.of(tensor) != before
        tensor.scale, tensor.bits = torch.ones(2), 8
        assert TensorSignature.of(tensor) != before
        assert "scale float32[2]" in str(before)

    def test_a_watch_notices_a_change_inside(self) -> None:
        model = nn.Linear(2, 2)
        model.weight = named(scale=torch.ones(2))
        watch, signature = ModelWatch(model, NO_ATTRIBUTES), ModelSignature.of(model)
        assert not watch.has_changed()
        model.weight.scale = torch.ones(2, dtype=torch.float64)  # pyright: ignore
        assert watch.has_changed()
        assert "weight was" in signature.difference(ModelSignature.of(model))


class TestHeldTensors:
    def test_plain_tensors_stand_in_the_places_for_a_time(self) -> None:
        model = nn.Module()
        model.first = nn.Linear(2, 2)
        model.second = nn.Linear(2, 2)
        tied = named(scale=torch.ones(2))
        model.first.weight = model.second.weight = tied
        with plain_places(model):
            assert type(model.first.weight) is nn.Parameter
            assert model.first.weight is model.second.weight
            assert model.first.weight.data_ptr() == tied.data_ptr()
        assert model.first.weight is tied
        assert model.second.weight is tied

    def test_attributes_get_the_inputs_of_a_trace(self) -> None:
        model, shared = nn.Linear(2, 2), torch.ones(2)
        model.weight = named(scale=shared, state=SimpleNamespace(again=shared, bits=4))
        held = HeldTensors(model)
        assert list(held.inputs.values()) == [("weight", ("scale",))]
        own = model.weight
        stands_for = {name: tensor + 1 for name, tensor in held.tensors.items()}
        with plain_places(model):
            held.put(stands_for)
            found: Any = model.weight
            assert found.scale is found.state.again is stands_for["held_0"]
            assert found.state.bits == 4
        assert own.scale is own.state.again is shared  # pyright: ignore


@made_of(lambda: {"wrapped": nn.Parameter(two())})
class Trained(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (self.wrapped * x).sum()


class TestWrappersOfSeveralTensors:
    def test_gradients_are_refused_by_name(self) -> None:
        x = torch.randn(4, 4)
        match = r"the gradient of wrapped is a TwoTensor, which wraps 2 tensors.*mode=\"frames\""
        with pytest.raises(UnsupportedModelError, match=match):
            RockmateModule(Trained(), x, 1.0, differentiable="all")

    def test_how_to_wrap_several(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"wraps 2 tensors or another wrapper"):
            Wrapping.like(two(), what="it")


class UsesItsClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.inner = nn.Parameter(torch.ones(4)), nn.Module()
        self.weight = named(scale=torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight.doubled * self.weight.scale + self.bias).sin().sum()


def test_a_property_of_the_class_is_refused_and_runs_untraced() -> None:
    model = nn.Sequential(UsesItsClass())
    x = torch.randn(4)
    match = r"0\.weight is of class Named.*untraced=\[\"0\"\].*mode=\"frames\""
    with pytest.raises(UnsupportedModelError, match=match):
        RockmateModule(model, x, 1.0)
    plain = copy.deepcopy(model)
    plain[0].weight = model[0].weight
    plain(x).backward()
    for options in ({"sample_input": x, "untraced": ["0"]}, {"mode": "frames"}):
        model.zero_grad()
        RockmateModule(model, budget=1.0, **options)(x).backward()  # pyright: ignore
        assert torch.equal(model[0].bias.grad, plain[0].bias.grad)  # pyright: ignore
