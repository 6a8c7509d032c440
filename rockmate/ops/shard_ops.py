"""Gathers and reductions as custom ops: what a trace records of a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rockmate.ops.shards import Reduction, gather_shards, reduce_to_shards


@torch.library.custom_op("rockmate::gather_shards", mutates_args=())
def _gather(
    shards: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    dtype: torch.dtype | None,
    sizes: Sequence[int],
    reduce_dtype: torch.dtype | None,
    replicas: str,
) -> list[Tensor]:
    return gather_shards(shards, dims, num_ranks, group, dtype, sizes)


@torch.library.custom_op("rockmate::reduce_to_shards", mutates_args=())
def _reduce(
    gradients: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    reduce_dtype: torch.dtype | None,
    dtype: torch.dtype,
    replicas: str,
) -> list[Tensor]:
    return reduce_to_shards(gradients, dims, num_ranks, group, reduce_dtype, dtype, replicas)


@_gather.register_fake
def _(*args: Any) -> list[Tensor]:
    return gather_shards(*args[:6])


_reduce.register_fake(reduce_to_shards)


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
        reduced = torch.ops.rockmate.reduce_to_shards(present, dims, *ctx.how)
        for index, part in zip(given, reduced, strict=True):
            parts[index] = part
    return parts, *[None] * 7


_gather.register_autograd(_reduce_gradients, setup_context=_keep_settings)


def function_of(target: Any) -> Callable[..., list[Tensor]] | None:
    """The plain function of an op on shards; None for any other target."""
    if target is torch.ops.rockmate.gather_shards.default:
        return gather_shards
    if target is torch.ops.rockmate.reduce_to_shards.default:
        return reduce_to_shards
    return None
