"""`fully_shard`: parameters divided among ranks, gathered by ops that a plan can see.

PyTorch's `fully_shard` gathers in hooks, which a captured graph does not contain. Here each sharded
parameter is read through a property of its module's class, as in SimpleFSDP (Zhang et al.,
arXiv:2411.00284, 2024). So the gather is an op of the forward, and the reduction of its gradient an
op of the backward. A gathered parameter is a value: a plan keeps it, or gathers it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from rockmate._torch.distributed import group_name_of, is_gathered_by_fsdp
from rockmate._torch.members import tensor_tables
from rockmate._torch.subclasses import is_subclassed
from rockmate.errors import UnsupportedModelError
from rockmate.sharding.parameter import dim_to_cut, sharded
from rockmate.sharding.sharded_class import put_sharded_class, sharded_model_of
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
        mesh: one dimension of a device mesh. None: all ranks of the default process group.
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
            several dimensions; the model is sharded already, by either generation of FSDP too; or a
            layer keeps its weights elsewhere.
    """
    from torch.distributed.device_mesh import init_device_mesh

    _refuse(module)
    if not (distributed.is_available() and distributed.is_initialized()):
        msg = "fully_shard needs a process group: call torch.distributed.init_process_group first."
        raise UnsupportedModelError(msg)
    if mesh is None:
        device = next((p.device.type for p in module.parameters() if not p.is_meta), "cpu")
        mesh = init_device_mesh(device, (distributed.get_world_size(),))
    if mesh.ndim != 1:
        msg = (
            f"fully_shard was given a mesh of {mesh.ndim} dimensions {tuple(mesh.shape)}, and "
            'shards over one. Give one of them: mesh["name"].'
        )
        raise UnsupportedModelError(msg)
    unknown = sorted(set(ignored) - {name for name, _ in module.named_parameters()})
    if unknown:
        msg = f"ignored names {unknown[0]!r}, which is no parameter of {type(module).__name__}."
        raise UnsupportedModelError(msg)
    policy = Policy.of(mp_policy, bucket_bytes)
    model = ShardedModel(policy, mesh.size(), group_name_of(mesh, 0), frozenset(ignored))
    _shard(module, mesh, model, tuple(units))
    return module


def _refuse(module: nn.Module) -> None:
    """Raises for a model that cannot be sharded here."""
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


def _shard(
    module: nn.Module, mesh: DeviceMesh, model: ShardedModel, kinds: tuple[type[nn.Module], ...]
) -> None:
    """Replaces the parameters of a model, and the classes of what has them."""
    heads = dict(_heads(module, kinds))
    names = {id(p): name for name, p in module.named_parameters()}
    _refuse_undivided(module, model)
    made: dict[int, nn.Parameter] = {}
    dims: dict[int, int] = {}
    places: dict[int, Place] = {}
    # Each place of a tied parameter stands for the first.
    readers: dict[nn.Module, dict[str, tuple[Unit, Place]]] = {}
    unit_of = dict(_units(module, heads, model))
    owners: dict[int, Unit] = {}
    found: dict[Unit, list[Place]] = {}
    for part in module.modules():
        table, _ = tensor_tables(part)
        for key, parameter in list(table.items()):
            if parameter is None or names[id(parameter)] in model.ignored:
                continue
            address = id(parameter)
            if address not in places:
                local = sharded(parameter, mesh)
                made[address], dims[address] = local.parameter, local.dim
                place = Place(part, key, local.dim, _gathered_bytes(parameter, model), local.rest)
                places[address], owners[address] = place, unit_of[part]
                found.setdefault(unit_of[part], []).append(place)
            readers.setdefault(part, {})[key] = owners[address], places[address]
    addresses = {
        (part, key): id(table[key])
        for part in readers
        for table in (tensor_tables(part)[0],)
        for key in readers[part]
    }
    for (part, key), address in addresses.items():
        tensor_tables(part)[0][key] = made[address]
    for unit, own in found.items():
        unit.add(own)
    for part in module.modules():
        if part in readers or part in heads or part is module:
            put_sharded_class(
                part,
                unit_of[part],
                readers.get(part, {}),
                is_head=part in heads or part is module,
                is_root=part is module,
            )


def _gathered_bytes(parameter: torch.Tensor, model: ShardedModel) -> int:
    dtype = model.policy.dtype if parameter.is_floating_point() else None
    return parameter.numel() * (dtype or parameter.dtype).itemsize


def _heads(
    module: nn.Module, kinds: tuple[type[nn.Module], ...]
) -> Iterator[tuple[nn.Module, None]]:
    """The modules that are units, from the outermost lists inwards."""
    if kinds:
        yield from ((part, None) for part in module.modules() if isinstance(part, kinds))
        return
    for child in [*module.children()] if not isinstance(module, _LISTS) else []:
        yield from _heads(child, kinds)
    if isinstance(module, _LISTS):
        yield from ((item, None) for item in module.children() if next(item.parameters(), None) is not None)


def _units(
    module: nn.Module, heads: dict[nn.Module, None], model: ShardedModel
) -> Iterator[tuple[nn.Module, Unit]]:
    """Each module with its unit: the innermost around it."""

    def walk(part: nn.Module, unit: Unit) -> Iterator[tuple[nn.Module, Unit]]:
        unit = Unit(model) if part in heads else unit
        yield part, unit
        for child in part.children():
            yield from walk(child, unit)

    yield from walk(module, Unit(model))


def _refuse_undivided(module: nn.Module, model: ShardedModel) -> None:
    for name, parameter in module.named_parameters():
        if name in model.ignored:
            continue
        if is_subclassed(parameter) and not hasattr(parameter, "device_mesh"):
            kind: Any = type(parameter).__name__
            msg = f"{name} is a {kind}, which cannot be sharded. Leave it whole: ignored=[{name!r}]."
            raise UnsupportedModelError(msg)
        local = getattr(parameter, "to_local", lambda p=parameter: p)()
        if dim_to_cut(local.shape, model.num_ranks) is None:
            msg = (
                f"{name} of shape {tuple(local.shape)} has no dimension that {model.num_ranks} "
                "ranks divide. Pad it, use another number of ranks, or leave it whole: "
                f"ignored=[{name!r}], and average its gradient over the ranks yourself."
            )
            raise UnsupportedModelError(msg)
