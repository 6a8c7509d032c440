"""Whole gradients that several backwards add up before they are reduced.

With micro batches a reduction in each backward sends as many bytes as the last one alone would have
to. So backwards may hold whole gradients instead, in the dtype of the reduction, as PyTorch's
`fully_shard` does after `set_requires_gradient_sync(False)`, whose switches are read here. They
take the memory of the whole parameters on each rank, at rest beside `.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rockmate._torch.fsdp import ShardedGroup, ShardedParameter, sharded_groups, unplanned_setting
from rockmate.errors import BackwardError
from rockmate.ops.shards import Reduction, issue_reduction


class HeldGradients:
    """The gradients that a sharded model holds.

    Attributes:
        groups: of the model.
    """

    def __init__(self) -> None:
        self.groups: list[ShardedGroup] = []
        self._held: dict[int, torch.Tensor] = {}  # by the address of the parameter

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
        self, parameters: Sequence[Any], gradients: Sequence[torch.Tensor], how: Reduction
    ) -> None:
        """Adds gradients to those that are held; copies the first of each parameter."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            held = self._held.get(id(parameter))
            if held is None:
                dtype = how.reduce_dtype or gradient.dtype
                self._held[id(parameter)] = gradient.detach().to(dtype, copy=True)
            else:
                held.add_(gradient)

    def joined(
        self, parameters: Sequence[Any], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Each gradient with what is held of its parameter, which is held no longer."""
        held = [self._held.pop(id(each), None) for each in parameters]
        pairs = zip(gradients, held, strict=True)
        return [new if sums is None else sums.add_(new) for new, sums in pairs]

    def reduce_others(self, holding: frozenset[int]) -> None:
        """Reduces what a backward has left: gradients of parameters that had none in it.

        Adds each to the `.grad` of its parameter, a `DTensor`.

        Args:
            holding: parameters whose gradients stay held.
        """
        for group in self.groups:
            for parameter, shard in zip(group.parameters, group.shards, strict=True):
                if id(shard) in self._held.keys() - holding:
                    self._reduce(group, parameter, shard)

    def _reduce(self, group: ShardedGroup, parameter: ShardedParameter, shard: Any) -> None:
        how = Reduction(
            group.num_ranks, parameter.reduce_dtype, shard.dtype, group.name, group.replicas
        )
        dim = parameter.dim
        (part,) = issue_reduction([self._held.pop(id(shard))], [dim], how)()
        if shard.grad is None:
            shard.grad = torch.zeros_like(shard)
        total: Any = shard.grad.to_local()  # pyright: ignore[reportAttributeAccessIssue]
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
