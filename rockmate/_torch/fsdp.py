"""What `torch.distributed.fsdp.fully_shard` has made of a model.

Public are its class `FSDPModule` and the parameters, which are `DTensor`s. Which of them are
gathered together, in which dtypes, and how gradients are reduced stands in private states alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_OWN = "torch.distributed.fsdp."


@dataclass(frozen=True, slots=True, eq=False)
class ShardedParameter:
    """A parameter of which each rank has a part.

    Attributes:
        places: submodules that have it, and its name there; several if it is tied.
        dim: the dimension that is cut.
        size: of that dimension, whole.
        padded_shape: of a rank's part, of which the last ones may hold less.
        dtype: in which it is gathered; None: its own.
        reduce_dtype: in which gradients are added; None: that in which they arrive.
        rest: how the gathered parameter is divided still, by tensor parallelism: a `DTensorSpec`.
    """

    places: tuple[tuple[nn.Module, str], ...]
    dim: int
    size: int
    padded_shape: torch.Size
    dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    rest: Any

    @property
    def tensor(self) -> Any:
        """What stands in its first place now: a `DTensor` if it is not gathered."""
        module, name = self.places[0]
        return module._parameters[name]


@dataclass(frozen=True, slots=True, eq=False)
class ShardedGroup:
    """Parameters that are gathered and reduced together.

    Attributes:
        parameters: in the order in which a collective has them.
        num_ranks: that share each.
        name: of their process group.
        replicas: name of the group of ranks with the same parts; "" if there is one of each.
    """

    parameters: tuple[ShardedParameter, ...]
    num_ranks: int
    name: str
    replicas: str
    _own: Any

    @property
    def shards(self) -> list[Any]:
        """The parameters as `DTensor`s, also while gathered ones stand in their places."""
        return [each.sharded_param for each in self._own.fsdp_params]

    @property
    def holds_gradients(self) -> bool:
        """Whether backwards hold whole gradients, after `set_requires_gradient_sync(False)`."""
        return not self._own.reduce_grads

    @property
    def unplanned_setting(self) -> str:
        """The method that has set how gradients are reduced, if plans do not follow it; else ""."""
        own = self._own
        collectives = own._all_gather_comm, own._reduce_scatter_comm
        settings = {
            "set_requires_all_reduce": bool(self.replicas)
            and own.reduce_grads
            and not own.all_reduce_grads,
            "set_gradient_divide_factor": own.gradient_divide_factor is not None,
            "set_all_reduce_hook": own._all_reduce_hook is not None,
            "set_force_sum_reduction_for_comms": own.force_sum_reduction_for_comms,
            "set_reduce_scatter_unused_params": getattr(own, "reduce_scatter_unused_params", False),
            "set_custom_all_gather or set_custom_reduce_scatter": any(
                not type(each).__module__.startswith(_OWN) for each in collectives
            ),
        }
        return next((name for name, is_set in settings.items() if is_set), "")


@dataclass(frozen=True, slots=True, eq=False)
class ShardedUnit:
    """What one call of `fully_shard` has made.

    Attributes:
        modules: that were given to it.
        groups: of parameters; one for each mesh.
        input_dtype: to which floating-point arguments of the modules are cast; None: as they are.
        output_dtype: the same of their outputs.
    """

    modules: tuple[nn.Module, ...]
    groups: tuple[ShardedGroup, ...]
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None


def sharded_units(model: nn.Module) -> list[ShardedUnit]:
    """All units of a model, outer ones first; none if `fully_shard` was not called.

    Raises:
        NotImplementedError: plans cannot follow how a unit is sharded; the text says the argument.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes seconds
    if fsdp is None:
        return []
    modules: Any = [each for each in model.modules() if isinstance(each, fsdp.FSDPModule)]
    return [_unit(state) for state in dict.fromkeys(m._get_fsdp_state() for m in modules)]


def _unit(state: Any) -> ShardedUnit:
    policy = state._mp_policy
    return ShardedUnit(
        tuple(state._modules),
        tuple(map(_group, _groups_of(state))),
        policy.param_dtype if policy.cast_forward_inputs else None,
        policy.output_dtype,
    )


def _groups_of(state: Any) -> list[Any]:
    """Its groups; until PyTorch 2.11 there is one, or none."""
    found = getattr(state, "_fsdp_param_groups", None)
    return [each for each in [state._fsdp_param_group] if each] if found is None else found


def _group(own: Any) -> ShardedGroup:
    mesh = own.mesh_info
    if not hasattr(mesh, "shard_process_group"):
        raise NotImplementedError("replicate")
    if getattr(mesh, "is_spmd_mesh", False):
        raise NotImplementedError("fully_shard(dp_mesh_dims=...)")
    shards, replicas = mesh.shard_process_group, getattr(mesh, "replicate_process_group", None)
    parameters = tuple(map(_parameter, own.fsdp_params))
    name = replicas.group_name if replicas is not None else ""
    return ShardedGroup(parameters, shards.size(), shards.group_name, name, own)


def _parameter(own: Any) -> ShardedParameter:
    info, policy, dim = own._module_info, own.mp_policy, own.fsdp_placement.dim
    if own.offload_to_cpu:
        raise NotImplementedError("fully_shard(offload_policy=CPUOffloadPolicy())")
    part = own.sharded_param._local_tensor
    if hasattr(part, "fsdp_pre_all_gather"):
        raise NotImplementedError(f"fsdp_pre_all_gather of the class {type(part).__name__}")
    dtype, reduce_dtype = own.sharded_param.dtype, policy.reduce_dtype
    if own.sharded_param.grad_dtype != dtype:
        raise NotImplementedError(f"gradients in {own.sharded_param.grad_dtype} of {dtype}")
    # Where no other is asked for: from PyTorch 2.15 on that of the parameter, before that in which
    # gradients arrive.
    if reduce_dtype is None and hasattr(type(own), "unsharded_grad_dtype"):
        reduce_dtype = dtype
    rest = getattr(own, "_unsharded_dtensor_spec", None) or getattr(own, "_tp_spec", None)
    return ShardedParameter(
        (
            (info.module, info.param_name),
            *zip(info.shared_modules, info.shared_param_names, strict=True),
        ),
        dim,
        own._orig_size[dim],
        own.padded_sharded_param_size,
        policy.param_dtype if dtype.is_floating_point else None,
        reduce_dtype,
        rest,
    )


def sharded_groups(model: nn.Module) -> list[ShardedGroup]:
    """The groups of all units of a model; errors as for `sharded_units`."""
    return [group for unit in sharded_units(model) for group in unit.groups]


def modules_with_shards(model: nn.Module) -> Iterator[nn.Module]:
    """The submodules that have sharded parameters."""
    for group in sharded_groups(model):
        yield from (module for each in group.parameters for module, _ in each.places)


def unplanned_setting(groups: Iterable[ShardedGroup]) -> str:
    """The method that has set how gradients are reduced, if plans do not follow it; else ""."""
    return next(filter(None, (group.unplanned_setting for group in groups)), "")


def put_shards(model: nn.Module) -> bool:
    """Releases gathered parameters, which stay behind a forward without a backward.

    Returns:
        Whether there were any.
    """
    gathered = [each._own for each in sharded_groups(model) if not each._own.is_sharded]
    for own in gathered:
        own.reshard()
    return bool(gathered)


def move_unit(wrapper: nn.Module, model: nn.Module) -> bool:
    """Has `fully_shard`, called with a wrapper, count as called with the module in it.

    Both have the same parameters and submodules. To be called where the class of the wrapper would
    be set, which `fully_shard` does last.

    Returns:
        Whether it was `fully_shard`.
    """
    from torch.distributed._composable_state import _get_module_state, _insert_module_state

    state: Any = _get_module_state(wrapper)
    if state is None or not hasattr(state, "_mp_policy"):
        return False
    _insert_module_state(model, state)
    vars(model)["_fsdp_state"] = state  # PyTorch has a weak reference
    own = {wrapper: model}
    state._modules = tuple(own.get(each, each) for each in state._modules)
    for group in _groups_of(state):
        group.modules = state._modules
        for parameter in group.fsdp_params:
            info = parameter._module_info
            info.module = own.get(info.module, info.module)
            info.shared_modules = [own.get(each, each) for each in info.shared_modules]
    hooks = list(fsdp_hooks(wrapper))
    for table, key, is_before in hooks:
        hook = table.pop(key)
        if is_before:
            model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        else:
            model.register_forward_hook(hook)
    return True


def is_fsdp_hook(hook: Any) -> bool:
    """Whether a hook of a module is one of `fully_shard`'s, around its forward."""
    return str(getattr(hook, "__module__", None)).startswith(_OWN)


def fsdp_hooks(module: nn.Module) -> Iterator[tuple[dict[int, Any], int, bool]]:
    """The hooks of `fully_shard` around the forward of a module.

    Yields:
        The table of a hook, its key there, and whether it runs before the forward.
    """
    for table, is_before in ((module._forward_pre_hooks, True), (module._forward_hooks, False)):
        for key, hook in list(table.items()):
            if is_fsdp_hook(hook):
                yield table, key, is_before
