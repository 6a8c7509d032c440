"""`fully_shard`: parameters divided among ranks, gathered by ops that a plan can see.

PyTorch's `fully_shard` gathers in hooks, which a captured graph does not contain. Here each sharded
parameter is read through a property of its module's class, as in SimpleFSDP (Zhang et al.,
arXiv:2411.00284, 2024). So the gather is an op of the forward, and the reduction of its gradient an
op of the backward. A gathered parameter is a value: a plan keeps it, or gathers it again.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from rockmate._torch.distributed import group_name_of, is_gathered_by_fsdp
from rockmate._torch.members import tensor_tables
from rockmate._torch.subclasses import is_subclassed
from rockmate.errors import InvalidArgumentError, UnsupportedModelError
from rockmate.sharding.mark import sharded_model_of
from rockmate.sharding.parameter import dim_to_cut, sharded, shards_of
from rockmate.sharding.sharded_class import put_sharded_class
from rockmate.sharding.unit import Place, Policy, ShardedModel, Unit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# What a plain forward of these reads is a second list of their weights.
_UNREADABLE = (nn.RNNBase,)


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    units: Collection[type[nn.Module]] = (),
    ignored: Collection[str] = (),
    bucket_bytes: int = 1 << 22,
) -> nn.Module:
    """Shards the parameters of a model over the ranks of a mesh, for a plan that gathers them.

    Each rank keeps an equal part of each parameter, as a `DTensor`. The forward gathers it where it
    is read, and the backward reduces the gradient to the mean over ranks and to this rank's part.
    Under `RockmateModule` what is gathered counts as activation memory within the budget, and is
    kept for the backward or gathered again by the plan's choice. Without it the model trains too,
    and keeps what is gathered until the backward.

    Losses, gradients, names and placements are those of `torch.distributed.fsdp.fully_shard`, so
    each loads the other's sharded checkpoints.

    Args:
        module: the model. It is changed in place, and keeps its names. On the meta device nothing
            is allocated: call `module.to_empty(device=...)` and initialize it afterwards.
        mesh: a device mesh of one dimension. One of two divides parameters along the second, and
            keeps a replica for each place of the first (HSDP). None: all ranks of the default
            process group.
        mp_policy: of `torch.distributed.fsdp`: dtypes of gathered parameters, of reductions, inputs
            and outputs.
        units: classes of layers that are gathered, and forgotten, together. None given: the items
            of lists of modules (`nn.ModuleList`, `nn.ModuleDict`, `nn.Sequential`).
        ignored: names of parameters that stay whole. Reducing their gradients is up to you.
        bucket_bytes: up to so many bytes of parameters of one unit are gathered in one collective.
            A larger parameter is gathered by itself.

    Returns:
        The same module.

    Raises:
        UnsupportedModelError: the mesh does not divide a parameter along any dimension, or has
            more than two dimensions or is on another device; the model is sharded already, by
            either generation of FSDP too; or a layer keeps its weights elsewhere.
    """
    _refuse(module)
    mesh = _mesh_for(module, mesh)
    policy = Policy.of(mp_policy, bucket_bytes)
    whole = _named(module, ignored)
    groups = [group_name_of(mesh, dim) for dim in range(mesh.ndim)]
    replicas = groups[0] if mesh.ndim == 2 else ""
    model = ShardedModel(policy, shards_of(mesh), groups[-1], replicas, whole)
    parameters = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if not any(parameter is each for each in whole)
    ]
    for name, parameter in parameters:
        _refuse_undivided(name, parameter, mesh)
    _shard(module, [parameter for _, parameter in parameters], mesh, model, tuple(units))
    return module


def _shard(
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    mesh: DeviceMesh,
    model: ShardedModel,
    kinds: tuple[type[nn.Module], ...],
) -> None:
    """Puts sharded parameters, and classes that gather them, in their places."""
    heads = set(_heads(module, kinds))
    unit_of = dict(_units(module, heads, Unit(model)))
    readers = _sharded_places(module, parameters, mesh, unit_of)
    for part in module.modules():
        if part in readers or part in heads or part is module:
            is_head, is_root = part in heads or part is module, part is module
            own = readers.get(part, {})
            put_sharded_class(part, unit_of[part], own, is_head=is_head, is_root=is_root)


def _refuse(module: nn.Module) -> None:
    """Raises for a model that cannot be sharded here."""
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(f"fully_shard was given {module!r}; give an nn.Module.")
    for name, part in module.named_modules():
        where = f"{name or 'the model'} ({type(part).__name__})"
        if isinstance(part, _UNREADABLE):
            msg = f"{where} keeps a second list of its weights, so they cannot be sharded."
        elif isinstance(part, nn.parallel.DistributedDataParallel):
            msg = f"{where} reduces gradients itself. Shard the model in it instead."
        elif is_gathered_by_fsdp(part):
            msg = f"{where} is sharded by PyTorch's FSDP. Give rockmate.fully_shard the plain model"
            msg += " in place of it."
        elif sharded_model_of(part) is not None:
            msg = f"{where} is sharded already. Call fully_shard once, with the whole model."
        else:
            continue
        raise UnsupportedModelError(msg)


def _mesh_for(module: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh that was given, of one or two dimensions, or that of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    if not (distributed.is_available() and distributed.is_initialized()):
        msg = "fully_shard needs a process group: call torch.distributed.init_process_group first."
        raise UnsupportedModelError(msg)
    if mesh is None:
        device = next((p.device.type for p in module.parameters() if not p.is_meta), "cpu")
        mesh = init_device_mesh(device, (distributed.get_world_size(),))
    if mesh.ndim > 2:
        msg = (
            f"fully_shard was given a mesh of {mesh.ndim} dimensions {tuple(mesh.shape)}. It "
            "replicates over one and shards over another: give it these, as "
            'mesh["replicate", "shard"].'
        )
        raise UnsupportedModelError(msg)
    return mesh


def _named(module: nn.Module, names: Collection[str]) -> tuple[nn.Parameter, ...]:
    present = dict(module.named_parameters(remove_duplicate=False))
    unknown = sorted(set(names) - present.keys())
    if unknown:
        msg = f"ignored names {unknown[0]!r}, which is no parameter of {type(module).__name__}."
        raise UnsupportedModelError(msg)
    return tuple(present[name] for name in names)


def _refuse_undivided(name: str, parameter: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raises for a parameter that cannot be cut into equal parts on the mesh."""
    if parameter.device.type not in (mesh.device_type, "meta"):
        msg = (
            f"{name} is on {parameter.device.type} and the mesh on {mesh.device_type}. Move the "
            "model first, or make it on the meta device."
        )
        raise UnsupportedModelError(msg)
    if is_subclassed(parameter) and not hasattr(parameter, "device_mesh"):
        kind = type(parameter).__name__
        msg = f"{name} is a {kind}, which cannot be sharded. Leave it out: ignored=[{name!r}]."
        raise UnsupportedModelError(msg)
    if parameter.grad_dtype != parameter.dtype:
        msg = (
            f"{name} is {parameter.dtype} and asks for gradients in {parameter.grad_dtype}, which "
            f"fully_shard does not give. Leave its grad_dtype alone, or ignored=[{name!r}]."
        )
        raise UnsupportedModelError(msg)
    local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if isinstance(parameter, DTensor) and mesh.ndim == 2:
        msg = (
            f"{name} is divided by tensor parallelism already, and the mesh for fully_shard "
            'replicates as well. Give it one dimension: mesh["shard"], over all data-parallel '
            "ranks."
        )
        raise UnsupportedModelError(msg)
    num_ranks = shards_of(mesh)
    if dim_to_cut(local.shape, num_ranks) is None:
        msg = (
            f"{name} of shape {tuple(local.shape)} has no dimension that {num_ranks} ranks divide. "
            "Pad it, use another number of ranks, or leave it whole, and average its gradient over "
            f"the ranks yourself: ignored=[{name!r}]."
        )
        raise UnsupportedModelError(msg)


def _sharded_places(
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    mesh: DeviceMesh,
    unit_of: Mapping[nn.Module, Unit],
) -> dict[nn.Module, dict[str, tuple[Unit, Place]]]:
    """Puts sharded parameters into all places of whole ones.

    Returns:
        For each module with some: name -> the unit that gathers it, and its first place, which the
        other places of a tied one stand for.
    """
    wanted = {id(parameter) for parameter in parameters}
    first: dict[int, tuple[Unit, Place, nn.Parameter]] = {}
    readers: dict[nn.Module, dict[str, tuple[Unit, Place]]] = {}
    for part in module.modules():
        table, _ = tensor_tables(part)
        for key, parameter in table.items():
            if parameter is None or id(parameter) not in wanted:
                continue
            unit = unit_of[part]
            if id(parameter) not in first:
                own = sharded(parameter, mesh)
                num_bytes = _gathered_bytes(parameter, unit.model.policy.dtype)
                place = Place(part, key, own.dim, num_bytes, own.rest)
                first[id(parameter)] = unit, place, own.parameter
            owner, place, _ = first[id(parameter)]
            readers.setdefault(part, {})[key] = owner, place
    for part in readers:
        table, _ = tensor_tables(part)
        table.update({key: first[id(table[key])][2] for key in readers[part]})
    places: dict[Unit, list[Place]] = {}
    for unit, place, _ in first.values():
        places.setdefault(unit, []).append(place)
    for unit, own in places.items():
        unit.add(own)
    return readers


def _gathered_bytes(parameter: torch.Tensor, dtype: torch.dtype | None) -> int:
    dtype = dtype if parameter.is_floating_point() else None
    return parameter.numel() * (dtype or parameter.dtype).itemsize


def _heads(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    """The submodules that are units, by class or as items of the outermost lists."""
    if kinds:
        yield from (part for part in module.modules() if isinstance(part, kinds))
    elif isinstance(module, _LISTS):
        yield from (item for item in module.children() if _has_parameters(item))
    else:
        for child in module.children():
            yield from _heads(child, kinds)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _units(
    module: nn.Module, heads: Container[nn.Module], unit: Unit
) -> Iterator[tuple[nn.Module, Unit]]:
    """Each module with its unit, which begins at the innermost head around it."""
    unit = Unit(unit.model) if module in heads else unit
    yield module, unit
    for child in module.children():
        yield from _units(child, heads, unit)
