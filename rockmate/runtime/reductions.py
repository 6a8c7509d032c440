"""Reductions of gradients to shards in an emitted backward: they run, or their gradients are held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rockmate.capture.roles import RoleKind
from rockmate.graph.ir import Graph, Op
from rockmate.ops.shards import part_shape, reduce_or_hold, reduce_to_shards
from rockmate.ops.undefined_gradient import undefined_gradient
from rockmate.runtime.gradient_sink import GradientSink


def emit_reduction(
    sink: GradientSink,
    names: Sequence[str],
    gradients: Sequence[torch.Tensor],
    dims: Sequence[int],
    num_ranks: int,
    group: str,
    reduce_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Reduces whole gradients, or holds them and returns undefined ones of this rank's parts."""
    settings = dims, num_ranks, group, reduce_dtype, dtype
    if sink.held is None:
        return reduce_to_shards(gradients, *settings)
    reduced = reduce_or_hold(sink.held, sink.leaves(names), gradients, *settings)
    if reduced is not None:
        return reduced
    return [
        undefined_gradient(whole.new_zeros(part_shape(whole, dim, num_ranks), dtype=dtype))
        for whole, dim in zip(gradients, dims, strict=True)
    ]


def reduced_names(graph: Graph, op: Op) -> tuple[str, ...]:
    """The parameters of which an op reduces the gradients, in the order of its arguments.

    The gradient of a tied one may be a sum of several that are reduced.
    """
    roles = {
        node: role.name
        for node, role in graph.outputs
        if role.kind is RoleKind.PARAMETER_GRADIENT
    }
    items = {int(user.args[1]): user for user in op.node.users}
    gradients: Any = op.node.args[0]
    return tuple(_name_of(items.get(index), roles) for index in range(len(gradients)))


def _name_of(result: fx.Node | None, roles: Mapping[fx.Node, str]) -> str:
    waiting = [] if result is None else [result]
    for node in waiting:
        if node in roles:
            return roles[node]
        waiting += node.users
    return ""
