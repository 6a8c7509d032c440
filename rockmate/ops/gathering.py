"""PyTorch's `fully_shard` in a capture: what its hooks do, as ops of the graph.

`fully_shard` gathers the parameters of a unit in hooks ahead of its forward. A trace has hooks of
its own in their places, which gather by one op for each bucket, and cast arguments and results as
the others do. So a gathered parameter is a value of the graph: a plan keeps it, or gathers it
again. In planned steps no submodule is called, and no hook runs.

A *bucket* is a list of parameters of one group, in its order, that one collective gathers. Its size
is bounded, so that a large parameter is gathered by itself, right before its first reader.

Where the ranks do not divide a dimension, the last of them hold less. A trace takes a part of the
size of the first rank's for theirs, which is what collectives take, and is the same on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rockmate._torch.fsdp import (
    ShardedGroup,
    ShardedParameter,
    ShardedUnit,
    fsdp_hooks,
    sharded_groups,
    sharded_units,
)
from rockmate._torch.members import tensor_tables
from rockmate._torch.pytree import tree_map_only
from rockmate.ops.shards import gather_shards

# The largest bucket of several parameters, in bytes of whole ones with their padding.
BUCKET_BYTES = 1 << 22


@contextlib.contextmanager
def gathered_by_ops(model: nn.Module) -> Iterator[None]:
    """For a trace of the forward: ops gather what hooks of `fully_shard` would have gathered."""
    with contextlib.ExitStack() as stack:
        for unit in sharded_units(model):
            _put_hooks(unit, stack)
        yield


def _put_hooks(unit: ShardedUnit, end: contextlib.ExitStack) -> None:
    """Puts hooks into the places of a unit's; `end` puts back what stood there, and parameters."""
    waiting = list(unit.groups)  # for the first call of a module

    def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        while waiting:
            _put_whole(waiting.pop(0), end)
        return _cast((args, kwargs), unit.input_dtype)

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return _cast(output, unit.output_dtype)

    for module in unit.modules:
        for table, key, is_before in fsdp_hooks(module):
            end.callback(table.__setitem__, key, table[key])
            table[key] = before if is_before else after


def _put_whole(group: ShardedGroup, end: contextlib.ExitStack) -> None:
    for bucket in _buckets(group):
        for parameter, whole in zip(bucket, _gathered(group, bucket), strict=True):
            for module, name in parameter.places:
                table, _ = tensor_tables(module)
                end.callback(table.__setitem__, name, table[name])
                table[name] = whole
                if hasattr(module, "quant_state"):
                    # Without it, bitsandbytes would make a weight of its own class.
                    whole.quant_state = module.quant_state


def _buckets(group: ShardedGroup) -> Iterator[list[ShardedParameter]]:
    """Parameters alike in dtypes, of which all are trained or none is."""
    buckets: dict[Any, list[ShardedParameter]] = {}
    for parameter in group.parameters:
        tensor = parameter.tensor
        kind = tensor.dtype, parameter.dtype, parameter.reduce_dtype, tensor.requires_grad
        bucket = buckets.setdefault(kind, [])
        num_elements = sum(each.padded_shape.numel() for each in (*bucket, parameter))
        itemsize = (parameter.dtype or tensor.dtype).itemsize
        if bucket and group.num_ranks * num_elements * itemsize > BUCKET_BYTES:
            yield buckets.pop(kind)
            bucket = buckets.setdefault(kind, [])
        bucket.append(parameter)
    yield from buckets.values()


def _gathered(group: ShardedGroup, bucket: list[ShardedParameter]) -> Iterator[Any]:
    first = bucket[0]
    found = gather_shards(
        [parameter.tensor.to_local() for parameter in bucket],
        [parameter.dim for parameter in bucket],
        group.num_ranks,
        first.dtype,
        [parameter.size for parameter in bucket],
        group.name,
        first.reduce_dtype,
        group.replicas,
    )
    for parameter, whole in zip(bucket, found, strict=True):
        rest = parameter.rest
        if rest is not None:
            shape, stride = rest.tensor_meta.shape, rest.tensor_meta.stride
            whole = _dtensor(whole, rest.mesh, rest.placements, shape, stride)
        yield whole


def _dtensor(part: torch.Tensor, mesh: Any, placements: Any, shape: Any, stride: Any) -> Any:
    from torch.distributed.tensor import DTensor  # loads sympy

    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """The same nesting with its floating-point tensors in a dtype; None: as it is."""
    if dtype is None:
        return values

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, values)


def padded_names(model: nn.Module) -> set[str]:
    """Names of the parameters of which this rank holds less than others."""
    padded = {id(each.tensor) for each in _padded_parameters(model)}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, tensor in named if id(tensor) in padded}


def put_padded_parts(model: nn.Module) -> None:
    """Puts parameters with padded parts into the places of those, for a trace."""
    for parameter in _padded_parameters(model):
        own = parameter.tensor
        part = own.detach().to_local().new_empty(parameter.padded_shape)
        made = _dtensor(part, own.device_mesh, own.placements, own.shape, own.stride())
        padded = nn.Parameter(made, own.requires_grad)
        for module, name in parameter.places:
            table, _ = tensor_tables(module)
            table[name] = padded


def _padded_parameters(model: nn.Module) -> list[ShardedParameter]:
    return [
        each
        for group in sharded_groups(model)
        for each in group.parameters
        if each.tensor.detach().to_local().shape != each.padded_shape
    ]
