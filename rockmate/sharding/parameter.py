"""One parameter, divided among ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rockmate._torch.distributed import joined_mesh, num_cuts, strided_shard
from rockmate.ops.kernel_layouts import contiguous_strides
from rockmate.sharding.unit import Rest


class Sharded(NamedTuple):
    """A parameter of which this rank has a part.

    Attributes:
        parameter: a `DTensor`.
        dim: the dimension that is cut.
        rest: how the gathered parameter is divided still, if it was a `DTensor` before.
    """

    parameter: nn.Parameter
    dim: int
    rest: Rest | None


def dim_to_cut(shape: torch.Size, num_ranks: int) -> int | None:
    """The first dimension that so many ranks divide; None if there is none."""
    return next((d for d, size in enumerate(shape) if size and size % num_ranks == 0), None)


def shards_of(mesh: Any) -> int:
    """Among how many ranks a mesh divides each parameter: its last dimension. Others replicate."""
    return mesh.size(mesh.ndim - 1)


def sharded(parameter: nn.Parameter, mesh: Any) -> Sharded:
    """This rank's part of a parameter, with what else the parameter carries.

    One that tensor parallelism has divided is divided further. Placements are those of PyTorch's
    `fully_shard`: where both cut one dimension, this one counts as the inner cut.
    """
    given: Any = parameter.detach()
    is_divided = isinstance(given, DTensor)
    local: Any = given.to_local() if is_divided else given
    num_ranks = shards_of(mesh)
    dim = dim_to_cut(local.shape, num_ranks)
    assert dim is not None, "the caller has checked it"
    rank = mesh.get_local_rank(mesh.ndim - 1)
    part = local.chunk(num_ranks, dim)[rank].contiguous().clone()
    replicated: Any = (Replicate(),) * (mesh.ndim - 1)
    rest, placements, whole_mesh = None, (*replicated, Shard(dim)), mesh
    if is_divided:
        rest = Rest(given.device_mesh, tuple(given.placements))
        cuts = num_cuts(given, dim)
        own: Any = Shard(dim) if cuts == 1 else strided_shard(dim, cuts)
        placements, whole_mesh = (own, *given.placements), joined_mesh(mesh, given.device_mesh)
    made = DTensor.from_local(
        part,
        whole_mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=contiguous_strides(parameter.shape),
    )
    new = nn.Parameter(made, requires_grad=parameter.requires_grad)
    vars(new).update(vars(parameter))
    return Sharded(new, dim, rest)
