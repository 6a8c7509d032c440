"""Checks of a kernel against the ops of its group: the same values, layouts and memory; its time.

A wrong kernel is refused here, before anything trains with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rockmate._torch.allocator import workspace_bytes
from rockmate._torch.cuda import kernel_ms
from rockmate.costs.measure import cpu_seconds
from rockmate.fusion.subgraph import Subgraph, layout
from rockmate.ops.kernel_layouts import as_tuple

_NUM_ROUNDS = 7

RANGES = ((0.25, 0.75), (-2.0, 6.0), (-1e-4, 3e-4))
"""What a group is checked on. In the first, no op leaves its domain. Of small numbers, a kernel for
`exp(x) - 1` has few digits where ATen's `expm1` has all. The means keep sums from cancelling."""


def sample_values(
    subgraph: Subgraph, bounds: tuple[float, float] = RANGES[0]
) -> list[torch.Tensor]:
    """Inputs to run a group on: numbers within bounds, small integers (no group reads indices)."""
    least, most = bounds
    generator = torch.Generator().manual_seed(0)
    values = []
    for storage in subgraph.inputs:
        shape, strides, dtype, device = layout(storage.root.meta["val"])
        drawn = torch.rand(shape, generator=generator)
        if dtype.is_floating_point:
            drawn = drawn * (most - least) + least
        else:
            drawn = drawn * (2 if dtype is torch.bool else 4)
            drawn = drawn.floor()
        value = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        values.append(value.copy_(drawn.to(dtype)))
    return values


def difference(
    subgraph: Subgraph, results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> str:
    """How results of a kernel differ from its ops' or what is captured; empty if they do not."""
    for storage, result, other in zip(subgraph.results, results, expected, strict=True):
        fake = storage.root.meta["val"]
        if layout(result) != layout(fake):
            return f"{storage.name} has strides {result.stride()}, captured {fake.stride()}"
        if result.untyped_storage().nbytes() != fake.untyped_storage().nbytes():
            return f"{storage.name} lies in memory of another size than captured"
        error = relative_error(result, other)
        if error > tolerance(subgraph):
            return f"{storage.name} differs by {error:.1e} from its ops' result"
    return ""


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance over the largest value; for integers, the share that differs."""
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return float((result != expected).double().mean())
    exact, other = expected.double(), result.double()
    is_equal = (exact == other) | (exact.isnan() & other.isnan())
    distance = (exact - other).abs().nan_to_num(nan=torch.inf).masked_fill(is_equal, 0.0)
    scale = exact.abs().masked_fill(~exact.isfinite(), 0.0).max().clamp_min(1e-30)
    return float(distance.max() / scale)


def tolerance(subgraph: Subgraph) -> float:
    """A relative error that rounding explains, in the least precise dtype of a group.

    A kernel adds in another order than ATen, and rounds between ops where ATen does not, or the
    other way around. A wrong kernel is off by the size of the values.
    """
    precisions = [
        torch.finfo(dtype).eps
        for _, _, dtype, _ in (*subgraph.layouts, *subgraph.result_layouts)
        if dtype.is_floating_point
    ]
    return 16 * max(precisions, default=0.0)


def time_ms(function: Callable[[], Any], device: torch.device) -> float:
    """The time of a function, in milliseconds: the least of several runs on a CPU."""
    function()
    if device.type == "cuda":
        return statistics.median_low(kernel_ms(function, device) for _ in range(_NUM_ROUNDS))
    times = []
    for _ in range(_NUM_ROUNDS):
        begin = cpu_seconds()
        result = function()
        times.append(cpu_seconds() - begin)
        del result
    return min(times) * 1e3


def is_in_place(
    form: Callable[..., Any], ordinary: Callable[..., Any], values: Sequence[torch.Tensor]
) -> bool:
    """Whether an in-place form gives an op's bits and allocates no more than its workspace."""
    device = values[0].device
    with torch.no_grad():
        expected, most_bytes = _run(ordinary, values, device)
        (target, *rest), num_bytes = _run(form, values, device, num_in_place=1)
    are_equal = map(torch.equal, (target, *rest), expected)
    return all(are_equal) and num_bytes <= most_bytes


def _run(
    function: Callable[..., Any],
    values: Sequence[torch.Tensor],
    device: torch.device,
    *,
    num_in_place: int = 0,
) -> tuple[tuple[torch.Tensor, ...], int]:
    """Results and workspace of a function; its first results may be arguments."""
    results: tuple[torch.Tensor, ...] = ()

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal results
        results = as_tuple(function(*tensors))
        return results[num_in_place:]

    num_bytes = workspace_bytes(lambda: (run, [value.clone() for value in values]), device)
    return results, num_bytes
