"""PyTorch's own functions in emitted code.

The dispatcher hears what it heard from the ops that they stand for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import planned
from made_of import made_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from rockmate import RockmateModule
from rockmate.runtime.direct_call import direct_function

aten = torch.ops.aten


@made_of(lambda: {"calls": []})
class _Heard(TorchDispatchMode):
    """Lists every op that is run, with its arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(
            lambda value: (
                (value.shape, value.stride(), value.dtype)
                if isinstance(value, torch.Tensor)
                else value
            ),
            args,
        )
        named = {
            name: value
            for name, value in (kwargs or {}).items()
            if not isinstance(value, torch.Tensor)
        }
        self.calls.append((func, plain, named, sorted(kwargs or ())))
        return func(*args, **(kwargs or {}))


def _heard_in_a_step(module: RockmateModule, workload: Any) -> list[Any]:
    batch = workload.make_batch(1)
    torch.manual_seed(0)
    with _Heard() as heard:
        workload.loss(module, batch)[1].backward()
    return heard.calls


@pytest.mark.parametrize("name", ["gpt2", "resnet50", "encoder"])
def test_the_dispatcher_hears_the_same_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = planned(name)
    budget = (case.planner.minimum_peak_bytes + case.planner.baseline_peak_bytes) // 2
    module = case.planner.module(budget, trial="never")
    program = module._plans.runnables[0].planned.program
    code = program.forward.code + program.backward.code
    with monkeypatch.context() as patch:
        patch.setattr("rockmate.runtime.direct_call.call_directly", lambda graph: None)
        by_op = case.planner.module(budget, trial="never")
    assert "torch.mm(" in code or "torch.addmm(" in code or "torch.convolution(" in code
    assert code.count("torch.ops.aten") < by_op._plans.runnables[
        0
    ].planned.program.backward.code.count("torch.ops.aten")
    for either in (module, by_op):  # what a first step makes is there from now on
        _heard_in_a_step(either, case.workload)
    assert _heard_in_a_step(module, case.workload) == _heard_in_a_step(by_op, case.workload)


VALUES = torch.randn(4, 4)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "expected"),
    [
        (aten.mm.default, (VALUES, VALUES), {}, torch.mm),
        (aten.add.Tensor, (VALUES, VALUES), {"alpha": 2}, torch.add),
        (aten.add.Tensor, (VALUES, 2.0), {}, torch.add),
        (aten.add.out, (VALUES, VALUES), {"out": VALUES}, torch.add),
        (aten.view.default, (VALUES, [16]), {}, torch.Tensor.view),
        (aten.relu_.default, (VALUES,), {}, torch.relu_),
        (aten.sum.dim_IntList, (VALUES, [0], True), {}, torch.sum),
        # torch.add makes another op of it, which rounds halves differently
        (aten.add.Scalar, (VALUES, 2.0), {}, None),
        (aten.slice.Tensor, (VALUES, 0, 0, 2), {}, None),  # there is no such function
        (aten.scalar_tensor.default, (1.0,), {}, None),
        (torch.ops.prims.sin.default, (VALUES,), {}, None),
    ],
)
def test_which_function_stands_for_an_op(op: Any, args: Any, kwargs: Any, expected: Any) -> None:
    assert direct_function(op, args, kwargs) is expected


def test_nothing_is_run_to_find_out() -> None:
    values, random = VALUES.clone(), torch.get_rng_state()
    assert direct_function(aten.mul_.Tensor, (values, values), {}) is torch.Tensor.mul_
    assert direct_function(aten.bernoulli_.float, (values, 0.5), {}) is torch.Tensor.bernoulli_
    assert torch.equal(values, VALUES)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_number_and_a_tensor_of_one_element_are_not_the_same_argument() -> None:
    half = torch.ones(2, dtype=torch.float16)
    factors = half, torch.tensor(2.0, dtype=torch.float64)
    assert direct_function(aten.mul.Tensor, factors, {}) is torch.mul
    assert direct_function(aten.mul.Tensor, (half, 2.0), {}) is torch.mul
