"""Whole gradients that several backwards add up before they are reduced.

With micro batches a reduction in each backward sends as many bytes as the last one alone would have
to. So backwards may hold whole gradients instead, in the dtype of the reduction, as PyTorch's
`fully_shard` does after `set_requires_gradient_sync(False)`, whose switches are read here. They
take the memory of the whole parameters on each rank, at rest beside `.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rockmate._torch.fsdp import ShardedGroup, sharded_groups, unplanned_setting
from rockmate.errors import BackwardError
from rockmate.ops.shards import Reduction, issue_reduction


class _Held(NamedTuple):
    parameter: Any
    gradient: torch.Tensor
    dim: int
    how: Reduction


class HeldGradients:
    """The gradients that a sharded model holds.

    Attributes:
        groups: of the model.
    """

    def __init__(self) -> None:
        """None are held yet."""
        self.groups: list[ShardedGroup] = []
        # By the address of the parameter, in the order in which they came.
        self._held: dict[int, _Held] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def holding(self) -> frozenset[int]:
        """Addresses of the parameters whose gradients backwards hold now.

        Raises:
            BackwardError: gradients are to be reduced in a way that a plan does not have.
        """
        setting = unplanned_setting(self.groups)
        if setting:
            msg = (
                f"{setting} was called after the step was planned, and planned steps do not follow "
                "it. Take the setting back, or use the plain model."
            )
            raise BackwardError(msg)
        holding = (group for group in self.groups if group.holds_gradients)
        return frozenset(id(shard) for group in holding for shard in group.shards)

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
        held = [self._held.pop(id(each), None) for each in parameters]
        pairs = zip(gradients, held, strict=True)
        return [new if each is None else each.gradient.add_(new) for new, each in pairs]

    def reduce_others(self, holding: frozenset[int]) -> None:
        """Reduces what a backward has left: gradients of parameters that had none in it.

        Adds each to the `.grad` of its parameter, a `DTensor`.

        Args:
            holding: parameters whose gradients stay held.
        """
        for key in [key for key in self._held if key not in holding]:
            parameter, gradient, dim, how = self._held.pop(key)
            (part,) = issue_reduction([gradient], [dim], how)()
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            total: Any = parameter.grad.to_local()  # pyright: ignore[reportAttributeAccessIssue]
            total.add_(part.narrow(dim, 0, total.shape[dim]))


def held_gradients_of(model: torch.nn.Module) -> HeldGradients | None:
    """The `HeldGradients` of a model that `fully_shard` has sharded; else None.

    All plans of a model have the same: one may reduce what another has held.
    """
    groups = sharded_groups(model)
    if not groups:
        return None
    held = vars(model).setdefault("_rockmate_held_gradients", HeldGradients())
    held.groups = groups
    return held
