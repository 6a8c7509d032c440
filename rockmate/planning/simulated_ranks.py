"""Ranks that are not there, to plan for them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from rockmate._torch.distributed import fake_group
from rockmate._torch.subclasses import is_subclassed
from rockmate.errors import InvalidArgumentError, RockmateError, UnsupportedModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MeshSizes = int | Sequence[int] | Mapping[str, int]
Shard = Callable[[nn.Module, "DeviceMesh"], Any]
# Names of the dimensions of a mesh that is given by sizes alone.
_NAMES = {1: ("shard",), 2: ("replicate", "shard")}
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@contextlib.contextmanager
def simulated_ranks(num_ranks: int) -> Iterator[None]:
    """A process group of so many ranks in one process, to plan a sharded model for a cluster.

    Within it, shard a model on the meta device and make a `Planner` with `machine=`, which
    `Planner(..., machine=..., mesh=...)` does by itself. Times of collectives follow from the ranks
    of their groups and the `[link]` of the machine's description. `Plan.predicted_ms` adds them to
    those of ops, and `Plan.overlapped_ms` lets them overlap. Nothing can be trained: collectives do
    nothing.

    Args:
        num_ranks: of the group.

    Raises:
        RockmateError: there is a process group already.
        InvalidArgumentError: `num_ranks` is below 1.
    """
    if not isinstance(num_ranks, int) or num_ranks < 1:
        msg = f"num_ranks is {num_ranks!r}; give 1 or more"
        raise InvalidArgumentError(msg)
    if distributed.is_available() and distributed.is_initialized():
        msg = (
            "simulated ranks are a process group, and there is one of "
            f"{distributed.get_world_size()} ranks. Plan in a process of its own."
        )
        raise RockmateError(msg)
    with fake_group(num_ranks):
        yield


def mesh_sizes(mesh: MeshSizes) -> dict[str, int]:
    """The sizes of a mesh by the names of its dimensions; see `Planner` for what they may be.

    Raises:
        InvalidArgumentError: they are no sizes of a mesh.
    """
    if isinstance(mesh, Mapping):
        sizes = dict(mesh)
    else:
        listed = (mesh,) if isinstance(mesh, int) else tuple(mesh)
        if len(listed) not in _NAMES:
            msg = (
                f"mesh is {mesh!r}. Give (shards,) or (replicas, shards); for other dimensions "
                'name them, as {"data": 4, "tensor": 8}, with shard=...'
            )
            raise InvalidArgumentError(msg)
        sizes = dict(zip(_NAMES[len(listed)], listed, strict=True))
    # True would be a size of 1.
    if not sizes or any(type(size) is not int or size < 1 for size in sizes.values()):
        msg = f"mesh is {mesh!r}; each of its sizes must be a whole number of at least 1"
        raise InvalidArgumentError(msg)
    return sizes


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The ranks of a mesh, in words."""
    number = prod(sizes.values())
    if len(sizes) == 1:
        return f"{number} rank{'s' if number > 1 else ''}"
    return f"{' x '.join(map(str, sizes.values()))} ranks ({', '.join(sizes)})"


@contextlib.contextmanager
def sharded_copy(
    model: nn.Module, sizes: Mapping[str, int], shard: Shard | None
) -> Iterator[nn.Module]:
    """A sharded copy of a model without memory, for as long as its ranks are simulated.

    Args:
        model: stays as it is.
        sizes: of the mesh, by the names of its dimensions.
        shard: takes a model, which it changes in place, and the mesh; None shards by layers.

    Raises:
        RockmateError: there is a process group already.
        UnsupportedModelError: the model cannot be copied or sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh

    divided = [name for name, each in model.named_parameters() if isinstance(each, DTensor)]
    if divided:
        msg = (
            f"{divided[0]} is divided among ranks already, and mesh= shards a plain model. Leave "
            "mesh out, or give the plain model."
        )
        raise UnsupportedModelError(msg)
    with simulated_ranks(prod(sizes.values())):
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        made = _without_memory(model)
        sharded = (shard or sharded_by_layers)(made, mesh)
        yield sharded if isinstance(sharded, nn.Module) else made


def sharded_by_layers(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """A model after PyTorch's `fully_shard` of each item of its outermost lists, then of itself.

    Args:
        module: the model. It is changed in place.
        mesh: see PyTorch's function, as for `options`.
        **options: of PyTorch's function.
    """
    from torch.distributed.fsdp import fully_shard  # takes seconds to load

    for each in dict.fromkeys((*_layers(module), module)):
        fully_shard(each, mesh=mesh, **options)
    return module


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, _LISTS):
            yield from [child] if next(child.parameters(), None) is not None else []
        else:
            yield from _layers(child)


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers are on the meta device.

    But for those of a class of their own: the copy would lose what the class says.
    """
    tensors = (*model.parameters(), *model.buffers())
    copies: dict[int, Any] = {id(t): _meta_tensor(t) for t in tensors if not is_subclassed(t)}
    try:
        return copy.deepcopy(model, copies)
    except Exception as error:
        msg = (
            f"the {type(model).__name__} cannot be copied ({error}), and mesh= shards a copy. Make "
            "the model on the meta device, and shard it within rockmate.simulated_ranks."
        )
        raise UnsupportedModelError(msg) from error


def _meta_tensor(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made.detach(), tensor.requires_grad)
    vars(made).update(vars(tensor))
    return made
