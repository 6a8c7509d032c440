"""Errors while ops are measured: whose fault each is, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rockmate import InvalidSampleError, RockmateError
from rockmate.costs.measure import measure_costs
from rockmate.graph.ir import Graph
from rockmate.step import capture_step


def failing(error: Exception) -> Callable[..., Any]:
    def op(*_: Any, **__: Any) -> Any:
        raise error

    return op


def graph_with(error: Exception) -> Graph:
    """A step whose first op raises an error."""
    graph = capture_step(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4)).graph
    graph.ops[0].node.target = failing(error)
    return graph


def test_shapes_that_an_op_does_not_take_are_the_samples_fault() -> None:
    with pytest.raises(InvalidSampleError, match=r"in 0 fails .*size mismatch.* Check the sample"):
        measure_costs(graph_with(RuntimeError("size mismatch")))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
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
