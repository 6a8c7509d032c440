"""Refusals name the next step, and it leads to a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_of import made_of
from torch import Tensor, nn

from rockmate import RockmateModule, UnsupportedModelError

MATRICES = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))


@made_of(lambda inverse: {"inverse": inverse})
class Inverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.inverse(x @ x.mT + torch.eye(4))


def _around(inverse: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Inverse(inverse), nn.Linear(4, 4))


def _gradients(model: nn.Module) -> list[Tensor]:
    model(MATRICES).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in gradients if gradient is not None]


def _has_equal_gradients(model: nn.Module, other: nn.Module) -> bool:
    expected, found = _gradients(model), _gradients(other)
    return len(expected) == len(found) == 4 and all(map(torch.equal, expected, found))


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="PyTorch before 2.13 leaves the check out of the graph",
)
@pytest.mark.parametrize("inverse", [torch.linalg.inv, torch.linalg.cholesky])
def test_a_check_of_values_names_two_ways_out(inverse: Callable[[Tensor], Tensor]) -> None:
    model = _around(inverse)
    with pytest.raises(UnsupportedModelError, match=r'ends in _ex .* untraced=\["1"\]'):
        RockmateModule(model, MATRICES, 1.0)
    eager = copy.deepcopy(model)
    assert _has_equal_gradients(eager, RockmateModule(model, MATRICES, 1.0, untraced=["1"]))


def test_a_value_that_a_hook_reads_is_not_left_to_the_hooks_own_submodule() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    model[1][0].register_forward_hook(lambda *given: float(given[2].norm()) * given[2])
    with pytest.raises(UnsupportedModelError, match=r'in 1\.0 at .*untraced=\["1"\]'):
        RockmateModule(model, MATRICES, 1.0)
    eager = copy.deepcopy(model)
    assert _has_equal_gradients(eager, RockmateModule(model, MATRICES, 1.0, untraced=["1"]))


@pytest.mark.parametrize("inverse", [torch.linalg.inv_ex, torch.linalg.cholesky_ex])
def test_functions_that_check_nothing_are_planned(inverse: Callable[[Tensor], Any]) -> None:
    model = _around(lambda x: inverse(x)[0])
    eager = copy.deepcopy(model)
    assert _has_equal_gradients(eager, RockmateModule(model, MATRICES, 1.0))


TABLE: dict[int, Tensor] = {}


def test_a_table_of_tensors_is_named_and_may_be_filled_before() -> None:
    def masked(x: Tensor) -> Tensor:
        if len(x) not in TABLE:
            TABLE[len(x)] = torch.tril(torch.ones(4, 4))
        return x * TABLE[len(x)]

    model = _around(masked)
    with pytest.raises(UnsupportedModelError, match=r"later in TABLE of .* before the first one"):
        RockmateModule(model, MATRICES, 1.0)
    eager = copy.deepcopy(model)
    assert not TABLE
    eager(MATRICES)
    assert _has_equal_gradients(eager, RockmateModule(model, MATRICES, 1.0))


@made_of(lambda: {"layerdrop": 0.5, "layer": nn.Linear(4, 4)})
class Drops(nn.Module):
    """Skips its layer by a random number."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < self.layerdrop:
            return x
        return self.layer(x)


def test_layerdrop_names_its_switches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Drops(), Drops())
    switches = r"without LayerDrop, setting 1\.layerdrop=0\.0, 2\.layerdrop=0\.0"
    with pytest.raises(UnsupportedModelError, match=switches):
        RockmateModule(model, MATRICES, 1.0)
