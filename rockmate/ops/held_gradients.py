"""Whole gradients that several backwards add up before they are reduced.

With micro batches a reduction in each backward sends as many bytes as the last one alone would have
to. So backwards may hold whole gradients instead, in the dtype of the reduction, as PyTorch's
`fully_shard` does after `set_requires_gradient_sync(False)`. They take the memory of the whole
parameters on each rank, at rest beside `.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rockmate.ops.shards import Reducing, Reduction, issue_reduction, reduce_to_shards


class _Held(NamedTuple):
    parameter: Any
    gradient: torch.Tensor
    dim: int
    how: Reduction


@dataclass(eq=False, slots=True)
class HeldGradients:
    """The gradients that a sharded model holds.

    Attributes:
        holds: whether backwards hold gradients now, or reduce them.
    """

    holds: bool = False
    # By the address of the parameter, in the order in which they came.
    _held: dict[int, _Held] = field(default_factory=dict)

    def add(
        self,
        parameters: Sequence[Any],
        gradients: Sequence[torch.Tensor],
        dims: Sequence[int],
        how: Reduction,
    ) -> None:
        """Adds gradients to those that are held; copies the first of each parameter."""
        for parameter, gradient, dim in zip(parameters, gradients, dims, strict=True):
            held = self._held.get(id(parameter))
            if held is None:
                first = gradient.detach().to(how.reduce_dtype or gradient.dtype, copy=True)
                self._held[id(parameter)] = _Held(parameter, first, dim, how)
            else:
                held.gradient.add_(gradient)

    def joined(
        self, parameters: Sequence[Any], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Each gradient with what is held of its parameter, which is held no longer."""
        return [
            gradient if held is None else held.gradient.add_(gradient)
            for gradient, held in zip(
                gradients, (self._held.pop(id(each), None) for each in parameters), strict=True
            )
        ]

    def take_all(self) -> list[_Held]:
        """What is still held, of parameters without a gradient in the backward that reduces."""
        left, self._held = list(self._held.values()), {}
        return left

    def __bool__(self) -> bool:
        return bool(self._held)


def issue_or_hold(
    held: HeldGradients,
    parameters: Sequence[Any],
    gradients: Sequence[torch.Tensor],
    dims: Sequence[int],
    how: Reduction,
) -> Reducing | None:
    """`issue_reduction` with what is held of the same parameters; None if they are held now.

    Args:
        held: of the model.
        parameters: one for each gradient.
        gradients: see `rockmate.ops.shards.reduce_to_shards`.
        dims: see there.
        how: they are reduced.
    """
    if held.holds:
        held.add(parameters, gradients, dims, how)
        return None
    if held:
        gradients = held.joined(parameters, gradients)
    return issue_reduction(gradients, dims, how)


def reduce_held(held: HeldGradients) -> None:
    """Reduces what a backward that reduces has left: gradients of parameters that had none in it.

    Adds each to the `.grad` of its parameter, a `DTensor`.
    """
    if held.holds:
        return
    for parameter, gradient, dim, how in held.take_all():
        (part,) = reduce_to_shards([gradient], [dim], *how)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        total: Any = parameter.grad
        total.to_local().add_(part)
