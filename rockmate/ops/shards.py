"""Gathers of sharded parameters, and reductions of their gradients to shards.

A *bucket* is a list of parameters that are gathered in one collective, so that small ones do not
pay its latency each. Dimension `dim` of a parameter is cut into parts as `torch.chunk` does it, one
a rank. Where they are not equal, those of the last ranks are padded.

    memory of the collective, for W ranks:   rank 0: [a0 b0]  rank 1: [a1 b1]  ...

Each is a custom op, of which a plan knows the overload. What it returns shares no memory, so each
whole parameter is released after its own last reader. Each has two halves, which issue the
collective and wait for it: a plan may run other ops between them.

On a GPU, what is gathered by itself along its first dimension, without padding, is the collective's
memory. On a CPU
it is copied out, since a thread of gloo holds that memory for a while after the collective.

| | allocates beside its results, on a CPU |
|---|---|
| `gather_shards` | the collective's memory, with gloo's copy of it before, without the results |
| `reduce_to_shards` | the collective's memory, of the gradients' size |
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rockmate._torch.distributed import (
    free,
    own_part,
    rank_in,
    ranks_of,
    start_all_reduce,
    start_gather,
    start_reduction,
    wait_for,
)

# Types whose sums cannot overflow, so that the division may come last.
_WIDE = (torch.float32, torch.bfloat16, torch.float64)


@torch.library.custom_op("rockmate::gather_shards", mutates_args=())
def gather_shards(
    shards: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    dtype: torch.dtype | None,
    sizes: Sequence[int],
    reduce_dtype: torch.dtype | None,
    replicas: str,
) -> list[Tensor]:
    """The whole tensors of which each rank has a part.

    Args:
        shards: this rank's parts, padded to the size of the first rank's.
        dims: for each, the dimension that is cut.
        num_ranks: of the group.
        group: name of the process group.
        dtype: of the results; None: that of the shards.
        sizes: of the dimensions that are cut, whole.
        reduce_dtype: of the `Reduction` of their gradients, for a trace.
        replicas: of the same.
    """
    return finish_gather(issue_gather(shards, dims, num_ranks, group, dtype, sizes))


class Gathering(NamedTuple):
    """A gather that has begun.

    Attributes:
        memory: of the collective.
        running: what to wait for.
        shapes: of this rank's parts.
        dims: for each, the dimension that is cut.
        num_ranks: of the group.
        sizes: of those dimensions, whole.
    """

    memory: Tensor
    running: Tensor
    shapes: tuple[torch.Size, ...]
    dims: Sequence[int]
    num_ranks: int
    sizes: Sequence[int]


def issue_gather(
    shards: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    dtype: torch.dtype | None,
    sizes: Sequence[int],
) -> Gathering:
    """Begins what `finish_gather` ends; arguments as for `gather_shards`."""
    dtype = dtype or shards[0].dtype
    numbers = [shard.numel() for shard in shards]
    total = sum(numbers)
    memory = torch.empty(num_ranks * total, dtype=dtype, device=shards[0].device)
    own = memory.narrow(0, rank_in(group) * total, total)
    for part, shard in zip(own.split(numbers), shards, strict=True):
        part.view(shard.shape).copy_(shard)
    running = start_gather(memory, own, num_ranks, group)
    return Gathering(memory, running, tuple(each.shape for each in shards), dims, num_ranks, sizes)


def has_whole_memory(shapes: Sequence[torch.Size], gather: Sequence[Any], device: Any) -> bool:
    """Whether what is gathered is the collective's memory, not a copy of it.

    Args:
        shapes: of the parts.
        gather: `dims`, `num_ranks` and `sizes` of `gather_shards`.
        device: of the parts.
    """
    dims, num_ranks, sizes = gather
    is_even = shapes[0][dims[0]] * num_ranks == sizes[0]
    return len(shapes) == 1 and dims[0] == 0 and is_even and device.type != "cpu"


def finish_gather(gathering: Gathering) -> list[Tensor]:
    """The whole tensors of a gather, once they are there."""
    memory, running, shapes, dims, num_ranks, sizes = gathering
    wait_for(running)
    if has_whole_memory(shapes, (dims, num_ranks, sizes), memory.device):
        return [memory.view(_resized(shapes[0], 0, sizes[0]))]
    rows = memory.view(num_ranks, -1).split([shape.numel() for shape in shapes], dim=1)
    whole = list(map(_joined, rows, shapes, dims, sizes))
    free(memory)
    return whole


class Reduction(NamedTuple):
    """How gradients are reduced.

    Attributes:
        num_ranks: of the group.
        group: name of the process group.
        reduce_dtype: in which gradients are added; None: that of the gradients.
        dtype: of the results.
        replicas: name of the group of ranks that have the same parts, over which the mean extends;
            "" if each part is on one rank.
    """

    num_ranks: int
    group: str
    reduce_dtype: torch.dtype | None
    dtype: torch.dtype
    replicas: str = ""


@torch.library.custom_op("rockmate::reduce_to_shards", mutates_args=())
def reduce_to_shards(
    gradients: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    reduce_dtype: torch.dtype | None,
    dtype: torch.dtype,
    replicas: str,
) -> list[Tensor]:
    """This rank's parts of the means of whole gradients over the ranks of a group.

    Args:
        gradients: whole ones, of this rank's part of the batch.
        dims: for each, the dimension that is cut.
        num_ranks: see `Reduction`, as for the others.
        group: see there.
        reduce_dtype: see there.
        dtype: see there.
        replicas: see there.
    """
    how = Reduction(num_ranks, group, reduce_dtype, dtype, replicas)
    return finish_reduction(issue_reduction(gradients, dims, how))


class Reducing(NamedTuple):
    """A reduction that has begun.

    Attributes:
        memory: of the collective.
        running: what to wait for.
        shapes: of the whole gradients.
        dims: for each, the dimension that is cut.
        how: they are reduced.
        divisor: of the sum, once it is complete.
    """

    memory: Tensor
    running: Tensor
    shapes: tuple[torch.Size, ...]
    dims: Sequence[int]
    how: Reduction
    divisor: float


def issue_reduction(gradients: Sequence[Tensor], dims: Sequence[int], how: Reduction) -> Reducing:
    """Begins what `finish_reduction` ends; arguments as for `reduce_to_shards`."""
    num_ranks, group, reduce_dtype, _, replicas = how
    reduce_dtype = reduce_dtype or gradients[0].dtype
    shapes = [each.shape for each in gradients]
    sizes = [prod(part_shape(s, d, num_ranks)) for s, d in zip(shapes, dims, strict=True)]
    num_replicas = len(ranks_of(replicas)) if replicas else 1
    before, after = _divisors(num_ranks * num_replicas, reduce_dtype)
    total, device = num_ranks * sum(sizes), gradients[0].device
    is_padded = total > sum(each.numel() for each in gradients)
    make = torch.zeros if is_padded else torch.empty
    memory = make(total, dtype=reduce_dtype, device=device)
    rows = memory.view(num_ranks, -1).split(sizes, dim=1)
    for row, gradient, dim in zip(rows, gradients, dims, strict=True):
        _cut_into(row, gradient, dim, num_ranks)
    if before != 1:
        memory.div_(before)
    running = start_reduction(memory, "avg" if after == 1 else "sum", num_ranks, group)
    return Reducing(memory, running, tuple(shapes), dims, how, after)


def finish_reduction(reducing: Reducing) -> list[Tensor]:
    """This rank's parts of the means of a reduction, once they are there."""
    memory, running, shapes, dims, how, divisor = reducing
    num_ranks = how.num_ranks
    reduced = own_part(wait_for(running), num_ranks, how.group)
    if how.replicas:
        wait_for(start_all_reduce(reduced, "avg" if divisor == 1 else "sum", how.replicas))
    if divisor != 1:
        reduced.div_(divisor)
    own = [part_shape(shape, dim, num_ranks) for shape, dim in zip(shapes, dims, strict=True)]
    parts = [
        part.to(how.dtype, copy=True).view(shape)
        for part, shape in zip(reduced.split([*map(prod, own)]), own, strict=True)
    ]
    free(memory)
    return parts


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


def _resized(shape: torch.Size, dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


def part_shape(shape: torch.Size, dim: int, num_ranks: int) -> list[int]:
    """The shape of a rank's part of a tensor that is cut along a dimension, with its padding."""
    return _resized(shape, dim, -(-shape[dim] // num_ranks))


@gather_shards.register_fake
def _(shards: Sequence[Tensor], dims: Sequence[int], *settings: Any) -> list[Tensor]:
    _, _, dtype, sizes, *_ = settings
    whole = zip(shards, dims, sizes, strict=True)
    return [each.new_empty(_resized(each.shape, d, size), dtype=dtype) for each, d, size in whole]


@reduce_to_shards.register_fake
def _(gradients: Sequence[Tensor], dims: Sequence[int], *settings: Any) -> list[Tensor]:
    how = Reduction(*settings)
    return [
        whole.new_empty(part_shape(whole.shape, dim, how.num_ranks), dtype=how.dtype)
        for whole, dim in zip(gradients, dims, strict=True)
    ]


def _joined(row: Tensor, shape: torch.Size, dim: int, size: int) -> Tensor:
    """A whole tensor from the parts of all ranks, one a row."""
    whole = row.new_empty(_resized(shape, dim, size))
    parts = row.unflatten(1, shape).unbind(0)
    for place, part in zip(whole.split(shape[dim], dim), parts, strict=False):
        place.copy_(part.narrow(dim, 0, place.shape[dim]))
    return whole


def _cut_into(row: Tensor, whole: Tensor, dim: int, num_ranks: int) -> None:
    """Writes the parts of a whole tensor into the memory of the ranks, one a row."""
    shape = part_shape(whole.shape, dim, num_ranks)
    for place, part in zip(row.unbind(0), whole.split(shape[dim], dim), strict=False):
        place.view(shape).narrow(dim, 0, part.shape[dim]).copy_(part)


def _keep_settings(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    shards, ctx.dims, num_ranks, group, _, _, reduce_dtype, replicas = inputs
    ctx.how = Reduction(num_ranks, group, reduce_dtype, shards[0].dtype, replicas)
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
