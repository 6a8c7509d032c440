"""Gathers and reductions as custom ops: what a trace records of a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rockmate._torch.engine import at_end_of_backward
from rockmate._torch.fake import is_fake
from rockmate.ops.held_gradients import HeldGradients, issue_or_hold, reduce_held
from rockmate.ops.shards import (
    Reduction,
    fake_parts,
    fake_whole,
    finish_reduction,
    gather_shards,
    reduce_to_shards,
)


@torch.library.custom_op("rockmate::gather_shards", mutates_args=())
def _gather(
    shards: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    replicas: str,
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
    replicas: str,
) -> list[Tensor]:
    return reduce_to_shards(gradients, dims, num_ranks, group, reduce_dtype, dtype, replicas)


@_gather.register_fake
def _(
    shards: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    dtype: torch.dtype | None,
    *_: Any,
) -> list[Tensor]:
    return fake_whole(shards, dims, num_ranks, dtype)


@_reduce.register_fake
def _(gradients: Sequence[Tensor], dims: Sequence[int], *settings: Any) -> list[Tensor]:
    return fake_parts(gradients, dims, Reduction(*settings))


class _Owners:
    """Whose shards the running call of `gathered` has: autograd hands a call's tensors on alone."""

    parameters: Sequence[Any] = ()
    held: HeldGradients | None = None


def _keep_settings(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    shards, ctx.dims, num_ranks, group, _, reduce_dtype, replicas = inputs
    ctx.how = Reduction(num_ranks, group, reduce_dtype, shards[0].dtype, replicas)
    ctx.parameters, ctx.held = _Owners.parameters, _Owners.held
    ctx.set_materialize_grads(False)  # a parameter that the loss does not read has no gradient


def _reduce_gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    given = [index for index, gradient in enumerate(gradients) if gradient is not None]
    parts: list[Tensor | None] = [None] * len(gradients)
    if given:
        dims = [ctx.dims[index] for index in given]
        present: Any = [gradients[index] for index in given]
        # A trace has the reduction alone. Whether it runs is decided in each backward.
        if ctx.held is not None and type(present[0]) is Tensor and not is_fake(present[0]):
            owners = [ctx.parameters[index] for index in given]
            running = issue_or_hold(ctx.held, owners, present, dims, ctx.how)
            reduced = () if running is None else finish_reduction(running)
            at_end_of_backward(partial(reduce_held, ctx.held))
        else:
            reduced = torch.ops.rockmate.reduce_to_shards(present, dims, *ctx.how)
        for index, part in zip(given, reduced, strict=False):
            parts[index] = part
    return parts, None, None, None, None, None, None


_gather.register_autograd(_reduce_gradients, setup_context=_keep_settings)


def gathered(
    shards: Sequence[Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    replicas: str,
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
        replicas: see there.
        parameters: to which the shards belong.
        held: gradients of the model that are held.
    """
    _Owners.parameters, _Owners.held = parameters, held
    try:
        return torch.ops.rockmate.gather_shards(
            shards, dims, num_ranks, group, dtype, reduce_dtype, replicas
        )
    finally:
        _Owners.parameters, _Owners.held = (), None


def function_of(target: Any) -> Callable[..., list[Tensor]] | None:
    """The plain function of an op on shards; None for any other target."""
    if target is torch.ops.rockmate.gather_shards.default:
        return gather_shards
    if target is torch.ops.rockmate.reduce_to_shards.default:
        return reduce_to_shards
    return None
