"""Gathers of sharded parameters, and reductions of their gradients to shards.

A *bucket* is a list of parameters that are gathered in one collective, so that small ones do not
pay its latency each. Dimension `dim` of a parameter is cut into equal parts, one a rank.

    memory of the collective, for W ranks:   rank 0: [a0 b0]  rank 1: [a1 b1]  ...

Each is a custom op in a trace and a plain function in a plan: `function_of` gives the one for the
other. What they return shares no memory, so each whole parameter is released after its own last
reader.

On a GPU, what is gathered by itself along its first dimension is the collective's memory. On a CPU
it is copied out, since a thread of gloo holds that memory for a while after the collective.

| | allocates beside its results, on a CPU |
|---|---|
| `gather_shards` | the collective's memory, with gloo's copy of it before, without the results |
| `reduce_to_shards` | the collective's memory, of the gradients' size |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rockmate._torch.distributed import all_gather_into, free, rank_in, reduce_in_place
from rockmate._torch.engine import at_end_of_backward
from rockmate._torch.fake import is_fake
from rockmate.ops.held_gradients import HeldGradients, Reduction

# Types whose sums cannot overflow, so that the division may come last.
_WIDE = (torch.float32, torch.bfloat16, torch.float64)


def gather_shards(
    shards: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    dtype: torch.dtype | None,
) -> list[Tensor]:
    """The whole tensors of which each rank has an equal part.

    Args:
        shards: this rank's parts.
        dims: for each, the dimension that is cut.
        num_ranks: of the group.
        group: name of the process group.
        dtype: of the results; None: that of the shards.
    """
    if is_fake(shards[0]):
        return _fake_whole(shards, dims, num_ranks, dtype)
    dtype = dtype or shards[0].dtype
    sizes = [shard.numel() for shard in shards]
    total = sum(sizes)
    memory = torch.empty(num_ranks * total, dtype=dtype, device=shards[0].device)
    own = memory.narrow(0, rank_in(group) * total, total)
    for part, shard in zip(own.split(sizes), shards, strict=True):
        part.view(shard.shape).copy_(shard)
    all_gather_into(memory, own, num_ranks, group)
    if len(shards) == 1 and dims[0] == 0 and memory.device.type != "cpu":
        return [memory.view(_whole_shape(shards[0], 0, num_ranks))]
    rows = memory.view(num_ranks, total).split(sizes, dim=1)
    whole = [
        _joined(row, shard, dim, num_ranks)
        for row, shard, dim in zip(rows, shards, dims, strict=True)
    ]
    free(memory)
    return whole


def reduce_to_shards(
    gradients: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    reduce_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    """This rank's parts of the means of whole gradients over the ranks of a group.

    Args:
        gradients: whole ones, of this rank's part of the batch.
        dims: for each, the dimension that is cut.
        num_ranks: of the group.
        group: name of the process group.
        reduce_dtype: in which they are added; None: that of the gradients.
        dtype: of the results.
    """
    first = gradients[0]
    if is_fake(first):
        return _fake_parts(gradients, dims, num_ranks, dtype)
    reduce_dtype = reduce_dtype or first.dtype
    sizes = [gradient.numel() // num_ranks for gradient in gradients]
    before, after = _divisors(num_ranks, reduce_dtype)
    memory = torch.empty(num_ranks * sum(sizes), dtype=reduce_dtype, device=first.device)
    rows = memory.view(num_ranks, -1).split(sizes, dim=1)
    for row, gradient, dim in zip(rows, gradients, dims, strict=True):
        _cut_into(row, gradient, dim, num_ranks)
    if before != 1:
        memory.div_(before)
    reduced = reduce_in_place(memory, "avg" if after == 1 else "sum", num_ranks, group)
    if after != 1:
        reduced.div_(after)
    parts = [
        part.to(dtype, copy=True).view(part_shape(whole, dim, num_ranks))
        for part, whole, dim in zip(reduced.split(sizes), gradients, dims, strict=True)
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


def _whole_shape(shard: Tensor, dim: int, num_ranks: int) -> list[int]:
    return [size * num_ranks if d == dim else size for d, size in enumerate(shard.shape)]


def part_shape(whole: Tensor, dim: int, num_ranks: int) -> list[int]:
    """The shape of a rank's part of a tensor that is cut along a dimension."""
    return [size // num_ranks if d == dim else size for d, size in enumerate(whole.shape)]


def _fake_whole(
    shards: Sequence[Tensor], dims: Sequence[int], num_ranks: int, dtype: torch.dtype | None
) -> list[Tensor]:
    """What `gather_shards` returns, without numbers."""
    pairs = zip(shards, dims, strict=True)
    return [each.new_empty(_whole_shape(each, d, num_ranks), dtype=dtype) for each, d in pairs]


def _fake_parts(
    gradients: Sequence[Tensor], dims: Sequence[int], num_ranks: int, dtype: torch.dtype
) -> list[Tensor]:
    """What `reduce_to_shards` returns, without numbers."""
    pairs = zip(gradients, dims, strict=True)
    return [each.new_empty(part_shape(each, d, num_ranks), dtype=dtype) for each, d in pairs]


def _joined(row: Tensor, shard: Tensor, dim: int, num_ranks: int) -> Tensor:
    """A whole tensor from the parts of all ranks, one a row."""
    whole = row.new_empty(_whole_shape(shard, dim, num_ranks))
    parts = row.unflatten(1, shard.shape).unbind(0)
    for place, part in zip(whole.chunk(num_ranks, dim), parts, strict=True):
        place.copy_(part)
    return whole


def _cut_into(row: Tensor, whole: Tensor, dim: int, num_ranks: int) -> None:
    """Writes the parts of a whole tensor into the memory of the ranks, one a row."""
    for place, part in zip(row.unbind(0), whole.chunk(num_ranks, dim), strict=True):
        place.view(part.shape).copy_(part)


# --- in a trace -----------------------------------------------------------------------------------


@torch.library.custom_op("rockmate::gather_shards", mutates_args=())
def _gather(
    shards: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> list[Tensor]:
    return gather_shards(shards, dims, num_ranks, group, dtype)


@torch.library.custom_op("rockmate::reduce_to_shards", mutates_args=())
def _reduce(
    gradients: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    reduce_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    return reduce_to_shards(gradients, dims, num_ranks, group, reduce_dtype, dtype)


@_gather.register_fake
def _(
    shards: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> list[Tensor]:
    return _fake_whole(shards, dims, num_ranks, dtype)


@_reduce.register_fake
def _(
    gradients: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    reduce_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    return _fake_parts(gradients, dims, num_ranks, dtype)


class _Owners:
    """Whose shards the running call of `gathered` has: autograd hands a call's tensors on alone."""

    parameters: Sequence[Any] = ()
    held: HeldGradients | None = None


def _keep_settings(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    shards, ctx.dims, ctx.num_ranks, ctx.group, _, ctx.reduce_dtype = inputs
    ctx.dtype, ctx.parameters, ctx.held = shards[0].dtype, _Owners.parameters, _Owners.held
    ctx.set_materialize_grads(False)  # a parameter that the loss does not read has no gradient


def _reduce_gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    given = [index for index, gradient in enumerate(gradients) if gradient is not None]
    parts: list[Tensor | None] = [None] * len(gradients)
    if given:
        dims = [ctx.dims[index] for index in given]
        settings = ctx.num_ranks, ctx.group, ctx.reduce_dtype, ctx.dtype
        present: Any = [gradients[index] for index in given]
        # A trace has the reduction alone. Whether it runs is decided in each backward.
        if ctx.held is not None and type(present[0]) is Tensor and not is_fake(present[0]):
            owners = [ctx.parameters[index] for index in given]
            reduced = reduce_or_hold(ctx.held, owners, present, dims, *settings)
            at_end_of_backward(partial(reduce_held, ctx.held))
        else:
            reduced = torch.ops.rockmate.reduce_to_shards(present, dims, *settings)
        for index, part in zip(given, reduced or (), strict=False):
            parts[index] = part
    return parts, None, None, None, None, None


_gather.register_autograd(_reduce_gradients, setup_context=_keep_settings)


def gathered(
    shards: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    parameters: Sequence[Any],
    held: HeldGradients,
) -> list[Tensor]:
    """`gather_shards`, whose gradients are reduced to shards, or held.

    Args:
        shards: see `gather_shards`.
        dims: see there.
        num_ranks: see there.
        group: see there.
        dtype: see there.
        reduce_dtype: see `reduce_to_shards`.
        parameters: to which the shards belong.
        held: gradients of the model that are held.
    """
    _Owners.parameters, _Owners.held = parameters, held
    try:
        return torch.ops.rockmate.gather_shards(shards, dims, num_ranks, group, dtype, reduce_dtype)
    finally:
        _Owners.parameters, _Owners.held = (), None


# --- gradients that are held ----------------------------------------------------------------------


def reduce_or_hold(
    held: HeldGradients,
    parameters: Sequence[Any],
    gradients: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    reduce_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> list[Tensor] | None:
    """`reduce_to_shards` with what is held of the same parameters; None if they are held now.

    Args:
        held: of the model.
        parameters: one for each gradient.
        gradients: see `reduce_to_shards`.
        dims: see there.
        num_ranks: see there.
        group: see there.
        reduce_dtype: see there.
        dtype: see there.
    """
    if held.holds:
        how = [Reduction(dim, num_ranks, group, reduce_dtype, dtype) for dim in dims]
        held.add(parameters, gradients, how)
        return None
    if held:
        gradients = held.joined(parameters, gradients)
    return reduce_to_shards(gradients, dims, num_ranks, group, reduce_dtype, dtype)


def reduce_held(held: HeldGradients) -> None:
    """Reduces what a backward that reduces has left: gradients of parameters that had none in it.

    Adds each to the `.grad` of its parameter, a `DTensor`.
    """
    if held.holds:
        return
    for parameter, gradient, (dim, *settings) in held.take_all():
        (part,) = reduce_to_shards([gradient], [dim], *settings)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.to_local().add_(part)


def function_of(target: Any) -> Callable[..., list[Tensor]] | None:
    """The plain function of an op of this module; None for any other target."""
    if target is torch.ops.rockmate.gather_shards.default:
        return gather_shards
    if target is torch.ops.rockmate.reduce_to_shards.default:
        return reduce_to_shards
    return None


ON_SHARDS = (gather_shards, reduce_to_shards)
