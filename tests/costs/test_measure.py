"""Errors while ops are measured: whose fault each is, and what to do."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import differing, gradients_of
from made_of import made_of
from torch import nn

import rockmate.costs.synthetic_inputs as inputs
from rockmate import InvalidSampleError, RockmateError, RockmateModule, UnsupportedModelError
from rockmate.costs.cost import Costs
from rockmate.costs.measure import measure_costs
from rockmate.graph.ir import Graph
from rockmate.planning.step import capture_step


def failing(error: Exception, *, num_good: int = 0) -> Callable[..., Any]:
    """An op that raises an error from some call on."""
    calls = itertools.count()

    def op(x: torch.Tensor, *_: Any, **__: Any) -> Any:
        if next(calls) >= num_good:
            raise error
        return torch.ones(2, 4)

    return op


def graph_with(error: Exception, *, num_good: int = 0) -> Graph:
    """A step whose first op raises an error."""
    graph = capture_step(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4)).graph
    graph.ops[0].node.target = failing(error, num_good=num_good)
    return graph


def test_shapes_that_an_op_does_not_take_are_the_samples_fault() -> None:
    with pytest.raises(InvalidSampleError, match=r"in 0 fails .*size mismatch.* Check the sample"):
        measure_costs(graph_with(RuntimeError("size mismatch")))


def test_an_op_that_raises_for_the_values_it_is_measured_on_is_refused() -> None:
    error = torch.linalg.LinAlgError("the input is not positive-definite")
    with pytest.raises(UnsupportedModelError, match=r" in 0 raises for some values.*_ex"):
        measure_costs(graph_with(error))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_too_little_memory_is_not_the_samples_fault(error: Exception) -> None:
    with pytest.raises(RockmateError, match=r"cpu is out of memory .* bytes.*machine=") as caught:
        measure_costs(graph_with(error))
    assert not isinstance(caught.value, InvalidSampleError)
    assert caught.value.__cause__ is error


def test_a_fault_of_this_library_keeps_its_error() -> None:
    with pytest.raises(KeyError, match="internal"):
        measure_costs(graph_with(KeyError("internal")))


def test_memory_may_run_out_in_a_later_round() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RockmateError, match=r"cpu is out of memory .* bytes.*machine="):
        measure_costs(graph_with(error, num_good=2))


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("no kernel"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("tensor.h:3 INTERNAL ASSERT FAILED"),
    ],
)
def test_a_fault_of_the_device_or_of_pytorch_passes_with_the_op(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        measure_costs(graph_with(error))
    assert caught.value is error
    assert any("in 0 was being measured" in note for note in error.__notes__)


@pytest.mark.parametrize("function", [torch.linalg.det, torch.logdet])
def test_pivots_are_measured_as_the_factorization_makes_them(function: Any) -> None:
    """They count from one, and integers are zeros otherwise."""

    @made_of(lambda: {"layer": nn.Linear(6, 6)})
    class Determinant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return function(y @ y.mT + torch.eye(6)).sum()

    torch.manual_seed(0)
    model, x = Determinant(), torch.randn(2, 6, 6)
    eager = copy.deepcopy(model)
    RockmateModule(model, x, 1.0)(x).backward()
    eager(x).backward()
    assert not differing(gradients_of(model), gradients_of(eager))


@pytest.mark.parametrize("divide", [torch.floor_divide, torch.remainder, torch.fmod])
def test_divisions_of_integers_are_measured(divide: Any) -> None:
    """A divisor of zero would raise, and integers are zeros otherwise."""

    @made_of(lambda: {"layer": nn.Linear(4, 4)})
    class Divides(nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * divide(i * 2, i)).sum()

    model, sample = Divides(), (torch.randn(3, 4), torch.randint(1, 9, (3, 4)))
    eager = copy.deepcopy(model)
    RockmateModule(model, sample, 1.0)(*sample).backward()
    eager(*sample).backward()
    assert not differing(gradients_of(model), gradients_of(eager))


# --- large inputs ---------------------------------------------------------------------------------


class _Filled(NamedTuple):
    costs: Costs
    squares: list[torch.Tensor]


def measured(monkeypatch: pytest.MonkeyPatch, *, least_bytes: int, most_bytes: int) -> _Filled:
    """Costs of a step, with each memory that was filled for an input."""
    filled: list[torch.Tensor] = []
    fill = inputs.constant

    def noted(fake: torch.Tensor) -> torch.Tensor:
        filled.append(fill(fake))
        return filled[-1]

    monkeypatch.setattr(inputs, "constant", noted)
    monkeypatch.setattr(inputs, "_LEAST_POOLED_BYTES", least_bytes)
    monkeypatch.setattr(inputs, "_MOST_POOLED_BYTES", most_bytes)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    graph = capture_step(model, torch.randn(16, 16)).graph
    return _Filled(measure_costs(graph), [each for each in filled if each.numel() == 256])


def test_large_inputs_are_filled_once_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most of one size that one call reads are as many as there ever are."""
    pooled = measured(monkeypatch, least_bytes=1024, most_bytes=1 << 20)
    assert 2 <= len(pooled.squares) <= 4
    apart = measured(monkeypatch, least_bytes=1 << 20, most_bytes=1 << 20)
    assert len(apart.squares) > 4 * len(pooled.squares)
    full = measured(monkeypatch, least_bytes=1024, most_bytes=1500)
    assert len(pooled.squares) < len(full.squares) < len(apart.squares)
    for other in (apart, full):
        assert [cost.overhead_bytes for cost in other.costs.first] == [
            cost.overhead_bytes for cost in pooled.costs.first
        ]


def test_two_inputs_of_a_call_never_share_a_memory() -> None:
    pool, fake = inputs.InputPool(), torch.empty(1 << 23, dtype=torch.float32)
    one, other = map(pool.for_call(), (fake, fake))
    assert one.data_ptr() != other.data_ptr()
    again = pool.for_call()(fake)
    assert again.data_ptr() == one.data_ptr()


def test_nothing_is_kept_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "free_bytes", lambda device: 1 << 29)
    pool = inputs.InputPool()
    fake = torch.empty(1 << 23, dtype=torch.float32)
    held = pool.for_call()(fake)
    assert pool.for_call()(fake).data_ptr() != held.data_ptr()
