"""Gathers of sharded parameters, and reductions of their gradients to shards.

A *bucket* is a list of parameters that are gathered in one collective, so that small ones do not
pay its latency each. Dimension `dim` of a parameter is cut into parts as `torch.chunk` does it, one
a rank. Where they are not equal, those of the last ranks are padded.

    memory of the collective, for W ranks:   rank 0: [a0 b0]  rank 1: [a1 b1]  ...

Each is a custom op, of which a plan knows the overload. What it returns shares no memory, so each
whole parameter is released after its own last reader. A plan may run other ops while a collective
runs: it calls the function that issues it, and later the `Wait` that this returns.

On a GPU, what is gathered by itself along its first dimension, without padding, is the collective's
memory. On a CPU it is copied out, since a thread of gloo holds that memory for a while after the
collective.

| | allocates beside its results, on a CPU |
|---|---|
| `gather_shards` | the collective's memory, with gloo's copy of it before, without the results |
| `reduce_to_shards` | the collective's memory, of the gradients' size |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rockmate._torch.distributed import (
    free,
    rank_in,
    ranks_of,
    start_all_reduce,
    start_gather,
    start_reduction,
    wait_for,
)

Wait = Callable[[], list[Tensor]]
"""Gives the results of a collective that is issued, once they are there; to be called once."""

# Types whose sums cannot overflow, so that the division may come last.
_WIDE = (torch.float32, torch.bfloat16, torch.float64)


@torch.library.custom_op(
    "rockmate::gather_shards",
    mutates_args=(),
    schema="(Tensor[] shards, int[] dims, int num_ranks, ScalarType? dtype, int[] sizes, "
    "str group, ScalarType? reduce_dtype, str replicas) -> Tensor[]",
)
def gather_shards(*args: Any) -> list[Tensor]:
    """The whole tensors of which each rank has a part.

    Args:
        *args: those of `issue_gather`, then `reduce_dtype` and `replicas` of the `Reduction` of
            their gradients, for a trace.
    """
    return issue_gather(*args)()


def issue_gather(
    shards: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    dtype: torch.dtype | None,
    sizes: Sequence[int],
    group: str,
    *_: Any,
) -> Wait:
    """Begins to gather.

    Args:
        shards: this rank's parts, with or without their padding.
        dims: for each, the dimension that is cut.
        num_ranks: of the group.
        dtype: of the results; None: that of the shards.
        sizes: of the dimensions that are cut, whole.
        group: name of the process group.
    """
    settings = zip(shards, dims, sizes, strict=True)
    shapes = [_resized(part.shape, dim, -(-size // num_ranks)) for part, dim, size in settings]
    numbers = [*map(prod, shapes)]
    total, device = sum(numbers), shards[0].device
    memory = torch.empty(num_ranks * total, dtype=dtype or shards[0].dtype, device=device)
    own = memory.narrow(0, rank_in(group) * total, total)
    for row, shard, shape, dim in zip(own.split(numbers), shards, shapes, dims, strict=True):
        row.view(shape).narrow(dim, 0, shard.shape[dim]).copy_(shard)
    running = start_gather(memory, own, num_ranks, group)

    def wait() -> list[Tensor]:
        wait_for(running)
        if has_whole_memory(shapes, dims, num_ranks, sizes, device):
            return [memory.view(_resized(shapes[0], 0, sizes[0]))]
        rows = memory.view(num_ranks, -1).split(numbers, dim=1)
        whole = list(map(_joined, rows, shapes, dims, sizes))
        free(memory)
        return whole

    return wait


def finish(wait: Wait) -> list[Tensor]:
    """The results of a collective that is issued; called from emitted code."""
    return wait()


def has_whole_memory(
    shapes: Sequence[Sequence[int]],
    dims: Sequence[int],
    num_ranks: int,
    sizes: Sequence[int],
    device: torch.device,
) -> bool:
    """Whether what is gathered is the collective's memory, not a copy of it.

    Args:
        shapes: of the parts, with their padding.
        dims: see `gather_shards`, as for `num_ranks` and `sizes`.
        num_ranks: see there.
        sizes: see there.
        device: of the parts.
    """
    is_even = shapes[0][dims[0]] * num_ranks == sizes[0]
    return len(shapes) == 1 and dims[0] == 0 and is_even and device.type != "cpu"


class Reduction(NamedTuple):
    """How gradients are reduced.

    Attributes:
        num_ranks: of the group.
        reduce_dtype: in which gradients are added; None: that of the gradients.
        dtype: of the results.
        group: name of the process group.
        replicas: name of the group of ranks that have the same parts, over which the mean extends;
            "" if each part is on one rank.
    """

    num_ranks: int
    reduce_dtype: torch.dtype | None
    dtype: torch.dtype
    group: str
    replicas: str


@torch.library.custom_op(
    "rockmate::reduce_to_shards",
    mutates_args=(),
    schema="(Tensor[] gradients, int[] dims, int num_ranks, ScalarType? reduce_dtype, "
    "ScalarType dtype, str group, str replicas) -> Tensor[]",
)
def reduce_to_shards(
    gradients: Sequence[Tensor], dims: Sequence[int], *settings: Any
) -> list[Tensor]:
    """What `issue_reduction` begins; the settings are those of a `Reduction`, in their order."""
    return issue_reduction(gradients, dims, Reduction(*settings))()


def issue_reduction(gradients: Sequence[Tensor], dims: Sequence[int], how: Reduction) -> Wait:
    """Begins to find this rank's parts, with their padding, of means over a group's ranks.

    Args:
        gradients: whole ones, of this rank's part of the batch.
        dims: for each, the dimension that is cut.
        how: they are reduced.
    """
    num_ranks, reduce_dtype, dtype, group, replicas = how
    reduce_dtype = reduce_dtype or gradients[0].dtype
    shapes = [part_shape(each.shape, d, num_ranks) for each, d in zip(gradients, dims, strict=True)]
    sizes = [*map(prod, shapes)]
    num_replicas = len(ranks_of(replicas)) if replicas else 1
    before, after = _divisors(num_ranks * num_replicas, reduce_dtype)
    mean = "avg" if after == 1 else "sum"
    total = num_ranks * sum(sizes)
    is_padded = total > sum(each.numel() for each in gradients)
    make = torch.zeros if is_padded else torch.empty
    memory = make(total, dtype=reduce_dtype, device=gradients[0].device)
    rows = memory.view(num_ranks, -1).split(sizes, dim=1)
    for row, gradient, shape, dim in zip(rows, gradients, shapes, dims, strict=True):
        _cut_into(row, gradient, shape, dim)
    if before != 1:
        memory.div_(before)
    wait_for_part = start_reduction(memory, mean, num_ranks, group)

    def wait() -> list[Tensor]:
        reduced = wait_for_part()
        if replicas:
            wait_for(start_all_reduce(reduced, mean, replicas))
        if after != 1:
            reduced.div_(after)
        rows = zip(reduced.split(sizes), shapes, strict=True)
        parts = [row.to(dtype, copy=True).view(shape) for row, shape in rows]
        free(memory)
        return parts

    return wait


def _divisors(num_ranks: int, dtype: torch.dtype) -> tuple[float, float]:
    """What a sum is divided by before and after; 1 and 1 leave the mean to the collective.

    In half precision the sum may overflow, so each rank divides by about the root of their number
    first, as PyTorch's `fully_shard` does.
    """
    if dtype in _WIDE:
        return 1, 1
    before = 1
    while num_ranks % before == 0 and num_ranks / before > before:
        before *= 2
    return before, num_ranks / before


def _resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


def part_shape(shape: torch.Size, dim: int, num_ranks: int) -> list[int]:
    """The shape of a rank's part of a tensor that is cut along a dimension, with its padding."""
    return _resized(shape, dim, -(-shape[dim] // num_ranks))


@gather_shards.register_fake
def _(shards: Sequence[Tensor], dims: Sequence[int], *settings: Any) -> list[Tensor]:
    _, dtype, sizes, *_ = settings
    whole = zip(shards, dims, sizes, strict=True)
    return [each.new_empty(_resized(each.shape, d, size), dtype=dtype) for each, d, size in whole]


@reduce_to_shards.register_fake
def _(gradients: Sequence[Tensor], dims: Sequence[int], *settings: Any) -> list[Tensor]:
    how = Reduction(*settings)
    return [
        whole.new_empty(part_shape(whole.shape, dim, how.num_ranks), dtype=how.dtype)
        for whole, dim in zip(gradients, dims, strict=True)
    ]


def _joined(row: Tensor, shape: Sequence[int], dim: int, size: int) -> Tensor:
    """A whole tensor from the parts of all ranks, one a row."""
    whole = row.new_empty(_resized(shape, dim, size))
    parts = row.unflatten(1, shape).unbind(0)
    for place, part in zip(whole.split(shape[dim], dim), parts, strict=False):
        place.copy_(part.narrow(dim, 0, place.shape[dim]))
    return whole


def _cut_into(row: Tensor, whole: Tensor, shape: Sequence[int], dim: int) -> None:
    """Writes the parts of a whole tensor into the memory of the ranks, one a row."""
    for place, part in zip(row.unbind(0), whole.split(shape[dim], dim), strict=False):
        place.view(shape).narrow(dim, 0, part.shape[dim]).copy_(part)


def _keep_settings(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    shards, ctx.dims, num_ranks, _, _, group, reduce_dtype, replicas = inputs
    ctx.how = Reduction(num_ranks, reduce_dtype, shards[0].dtype, group, replicas)
    ctx.set_materialize_grads(False)  # a parameter that the loss does not read has no gradient


def _reduce_gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    given = [index for index, gradient in enumerate(gradients) if gradient is not None]
    parts: list[Tensor | None] = [None] * len(gradients)
    if given:
        present: Any = [gradients[index] for index in given]
        dims = [ctx.dims[index] for index in given]
        reduced = reduce_to_shards(present, dims, *ctx.how)
        for index, part in zip(given, reduced, strict=True):
            parts[index] = part
    return parts, *[None] * 7


gather_shards.register_autograd(_reduce_gradients, setup_context=_keep_settings)


GATHER = torch.ops.rockmate.gather_shards.default
REDUCE = torch.ops.rockmate.reduce_to_shards.default
ON_SHARDS = (GATHER, REDUCE)
