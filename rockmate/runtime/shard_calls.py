"""Reductions of gradients to shards in an emitted backward.

They run in one call, or in one that issues them and one that waits. Where the user wants no
reduction yet, whole gradients are held instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from rockmate.capture.roles import RoleKind
from rockmate.graph.ir import Graph, Op
from rockmate.ops.shards import (
    Reducing,
    Reduction,
    finish_reduction,
    issue_reduction,
    part_shape,
)
from rockmate.ops.undefined_gradient import undefined_gradient
from rockmate.runtime.gradient_sink import GradientSink


class _Begun(NamedTuple):
    """A reduction between its issue and its wait; `running` is None if its gradients are held."""

    running: Reducing | None
    undefined: list[torch.Tensor]


def emit_issue(
    sink: GradientSink,
    names: Sequence[str],
    gradients: Sequence[torch.Tensor],
    dims: Sequence[int],
    *settings: Any,
) -> _Begun:
    """Begins to reduce whole gradients, or holds them; see `reduce_to_shards`."""
    how = Reduction(*settings)
    if sink.held is None:
        return _Begun(issue_reduction(gradients, dims, how), [])
    parameters = sink.leaves(names)
    if id(parameters[0]) not in sink.holding:
        gradients = sink.held.joined(parameters, gradients) if sink.held else gradients
        return _Begun(issue_reduction(gradients, dims, how), [])
    sink.held.add(parameters, gradients, dims, how)
    shapes = [part_shape(w.shape, d, how.num_ranks) for w, d in zip(gradients, dims, strict=True)]
    zeros = [gradients[0].new_zeros(shape, dtype=how.dtype) for shape in shapes]
    return _Begun(None, [undefined_gradient(each) for each in zeros])


def emit_wait(reduction: _Begun) -> list[torch.Tensor]:
    """This rank's parts of reduced gradients; undefined ones if whole gradients are held."""
    running, undefined = reduction
    return undefined if running is None else finish_reduction(running)


def emit_reduction(sink: GradientSink, names: Sequence[str], *args: Any) -> list[torch.Tensor]:
    """Reduces whole gradients, or holds them; arguments as for `emit_issue`."""
    return emit_wait(emit_issue(sink, names, *args))


def reduced_names(graph: Graph, op: Op) -> tuple[str, ...]:
    """The parameters of which an op reduces the gradients, in the order of its arguments.

    The gradient of a tied one may be a sum of several that are reduced.
    """
    roles = {
        node: role.name for node, role in graph.outputs if role.kind is RoleKind.PARAMETER_GRADIENT
    }
    items: dict[Any, fx.Node] = {user.args[1]: user for user in op.node.users}
    gradients: Any = op.node.args[0]
    return tuple(_name_of(items.get(index), roles) for index in range(len(gradients)))


def _name_of(result: fx.Node | None, roles: Mapping[fx.Node, str]) -> str:
    waiting = [] if result is None else [result]
    for node in waiting:
        if node in roles:
            return roles[node]
        waiting += node.users
    return ""
