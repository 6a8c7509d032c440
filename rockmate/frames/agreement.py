"""What ranks that hold shards of the same parameters agree on before they decide.

A recomputed frame may gather its parameters again. So all of these ranks must drop the
same frames, whatever each has measured: allocations of collectives end at times of their own, and
batches and shards may differ in size. Each number that decides is the largest of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn

_NUM_ROUNDS = 2
"""How often each group exchanges what its ranks know: the same on all ranks."""


class Agreement:
    """The process groups over which a model is sharded.

    Ranks may meet only by way of others: those of one row of a grid and of the next, say. After two
    rounds a rank knows what ranks know with which two others connect it.
    """

    def __init__(self, model: nn.Module) -> None:
        """Finds the groups.

        Args:
            model: whose parameters are `DTensor`s, at least some.
        """
        from torch.distributed.tensor import DTensor  # loads sympy

        meshes = dict.fromkeys(
            each.device_mesh for each in model.parameters() if isinstance(each, DTensor)
        )
        groups = {
            tuple(distributed.get_process_group_ranks(group)): group
            for mesh in meshes
            for group in mesh.get_all_groups()
            if group.size() > 1
        }
        # In one order on all ranks, or they would wait for each other.
        self._groups = [groups[ranks] for ranks in sorted(groups)] * _NUM_ROUNDS
        self._device = next((mesh.device_type for mesh in meshes), "cpu")

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each of a few numbers. Collective."""
        found = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        for group in self._groups:
            distributed.all_reduce(found, distributed.ReduceOp.MAX, group)
        return [int(each) for each in found.tolist()]

    def of_all(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of these. Collective, and slow."""
        known = {distributed.get_rank(): value}
        for group in self._groups:
            found: list[Any] = [None] * group.size()
            distributed.all_gather_object(found, known, group)
            known = {rank: each for table in found for rank, each in table.items()}
        return [known[rank] for rank in sorted(known)]
