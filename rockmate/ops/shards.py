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


class Cut(NamedTuple):
    """How a tensor is cut into parts.

    Attributes:
        shape: of the whole tensor.
        dim: the dimension that is cut.
        num_ranks: that have a part each.
    """

    shape: Sequence[int]
    dim: int
    num_ranks: int

    @property
    def part(self) -> list[int]:
        """The shape of a part, with its padding."""
        return _resized(self.shape, self.dim, -(-self.shape[self.dim] // self.num_ranks))

    def joined(self, row: Tensor) -> Tensor:
        """The whole tensor from a row for each rank's part."""
        whole = row.new_empty(self.shape)
        parts = row.unflatten(1, self.part).unbind(0)
        places = whole.split(self.part[self.dim], self.dim)
        for place, part in zip(places, parts, strict=False):
            place.copy_(part.narrow(self.dim, 0, place.shape[self.dim]))
        return whole

    def write(self, whole: Tensor, row: Tensor) -> None:
        """Writes the parts of the whole tensor into a row for each rank."""
        parts = whole.split(self.part[self.dim], self.dim)
        for place, part in zip(row.unbind(0), parts, strict=False):
            place.view(self.part).narrow(self.dim, 0, part.shape[self.dim]).copy_(part)


def _resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


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
    cuts = [Cut(_resized(part.shape, dim, size), dim, num_ranks) for part, dim, size in settings]
    numbers = [prod(cut.part) for cut in cuts]
    total, device = sum(numbers), shards[0].device
    memory = torch.empty(num_ranks * total, dtype=dtype or shards[0].dtype, device=device)
    own = memory.narrow(0, rank_in(group) * total, total)
    for row, shard, cut in zip(own.split(numbers), shards, cuts, strict=True):
        row.view(cut.part).narrow(cut.dim, 0, shard.shape[cut.dim]).copy_(shard)
    running = start_gather(memory, own, num_ranks, group)

    def wait() -> list[Tensor]:
        wait_for(running)
        if has_whole_memory(cuts, device):
            return [memory.view(cuts[0].shape)]
        rows = memory.view(num_ranks, -1).split(numbers, dim=1)
        whole = [cut.joined(row) for cut, row in zip(cuts, rows, strict=True)]
        free(memory)
        return whole

    return wait


def finish(wait: Wait) -> list[Tensor]:
    """The results of a collective that is issued; called from emitted code."""
    return wait()


def has_whole_memory(cuts: Sequence[Cut], device: torch.device) -> bool:
    """Whether what is gathered on a device is the collective's memory, not a copy of it."""
    cut = cuts[0]
    is_even = cut.shape[cut.dim] % cut.num_ranks == 0
    return len(cuts) == 1 and cut.dim == 0 and is_even and device.type != "cpu"


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
    cuts = [Cut(g.shape, dim, num_ranks) for g, dim in zip(gradients, dims, strict=True)]
    sizes = [prod(cut.part) for cut in cuts]
    num_replicas = len(ranks_of(replicas)) if replicas else 1
    before, after = _divisors(num_ranks * num_replicas, reduce_dtype)
    mean = "avg" if after == 1 else "sum"
    total = num_ranks * sum(sizes)
    is_padded = total > sum(each.numel() for each in gradients)
    make = torch.zeros if is_padded else torch.empty
    memory = make(total, dtype=reduce_dtype, device=gradients[0].device)
    rows = memory.view(num_ranks, -1).split(sizes, dim=1)
    for row, gradient, cut in zip(rows, gradients, cuts, strict=True):
        cut.write(gradient, row)
    if before != 1:
        memory.div_(before)
    wait_for_part = start_reduction(memory, mean, num_ranks, group)

    def wait() -> list[Tensor]:
        reduced = wait_for_part()
        if replicas:
            wait_for(start_all_reduce(reduced, mean, replicas))
        if after != 1:
            reduced.div_(after)
        rows = zip(reduced.split(sizes), cuts, strict=True)
        parts = [row.to(dtype, copy=True).view(cut.part) for row, cut in rows]
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


@gather_shards.register_fake
def _(shards: Sequence[Tensor], dims: Sequence[int], *settings: Any) -> list[Tensor]:
    _, dtype, sizes, *_ = settings
    whole = zip(shards, dims, sizes, strict=True)
    return [each.new_empty(_resized(each.shape, d, size), dtype=dtype) for each, d, size in whole]


@reduce_to_shards.register_fake
def _(gradients: Sequence[Tensor], dims: Sequence[int], *settings: Any) -> list[Tensor]:
    return zero_parts(gradients, dims, Reduction(*settings))


def zero_parts(gradients: Sequence[Tensor], dims: Sequence[int], how: Reduction) -> list[Tensor]:
    """Zeros in the shapes of what `issue_reduction` gives."""
    return [
        whole.new_zeros(Cut(whole.shape, dim, how.num_ranks).part, dtype=how.dtype)
        for whole, dim in zip(gradients, dims, strict=True)
    ]


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
