"""The gradients that a captured inside returns: of each reader of a tensor, and of casts.

Autograd adds up the gradients of a tensor as they arrive. Where a tensor has readers within a frame
and outside of it, the order of these additions is that of eager only if each reader within hands
over its gradient by itself. A captured graph has their sum.

Autocast casts a parameter once for all calls until its context ends, and autograd adds up the
gradients of the cast. So a captured inside returns the gradient of the cast, not the parameter's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rockmate._torch.autocast import autocast_dtypes
from rockmate._torch.engine import nodes_of
from rockmate.capture.nodes import sums_of
from rockmate.capture.roles import Capture, Role, RoleKind
from rockmate.errors import UnsupportedModelError
from rockmate.graph.ir import Graph

_CAST = torch.ops.aten._to_copy.default


@contextmanager
def contributions_noted(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> Iterator[list[list[torch.Tensor]]]:
    """Notes the gradients that arrive at leaves in a backward, for each leaf in their order.

    Args:
        outputs: where the backward begins.
        leaves: tensors without a history.
    """
    found: list[list[torch.Tensor]] = [[] for _ in leaves]
    nodes = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
    places = dict(zip(nodes, range(len(nodes)), strict=True))
    handles: list[Any] = []
    for node in _nodes_of(outputs):
        edges = [places.get(following) for following, _ in node.next_functions]
        if any(place is not None for place in edges):
            handles.append(node.register_hook(_noting(edges, found)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _nodes_of(outputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    seen = nodes_of(outputs)
    pending = list(seen)
    while pending:
        node = pending.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        pending += new


def _noting(edges: Sequence[int | None], found: Sequence[list[torch.Tensor]]) -> Any:
    def note(gradients: tuple[torch.Tensor | None, ...], _: Any) -> None:
        for place, gradient in zip(edges, gradients, strict=False):
            if place is not None and gradient is not None:
                found[place].append(gradient)

    return note


def one_gradient_per_reader(capture: Capture, counts: Mapping[Role, int]) -> Capture | None:
    """The capture with each sum of gradients taken apart.

    Args:
        capture: a joint graph as it was traced; it is changed in place.
        counts: role of a gradient -> how many autograd adds up.

    Returns:
        The capture, in which such a role comes once for each reader, in the order in which autograd
        adds them; None if a sum is not what `counts` says.
    """
    returned = capture.joint.graph.output_node()
    old: Any = returned.args[0]
    values: list[Any] = []
    roles: list[Role | None] = []
    for value, role in zip(old, capture.output_roles, strict=True):
        terms = [value] if role is None else _terms(value, counts.get(role, 1))
        if terms is None:
            return None
        values += terms
        roles += [role] * len(terms)
    returned.args = (tuple(values),)
    return replace(capture, output_roles=tuple(roles))


def _terms(value: Any, count: int) -> list[Any] | None:
    """So many that a value is the sum of, in the order of the additions; None if it is not."""
    sums: list[Any] = sums_of(value)[: count - 1]
    if len(sums) < count - 1:
        return None
    first = sums[-1].args[0] if sums else value
    return [first, *(each.args[1] for each in reversed(sums))]


def return_gradients_of_casts(module: nn.Module, capture: Capture) -> None:
    """Changes the graph so that it returns the gradient of each cast that autocast keeps.

    Args:
        module: which was captured.
        capture: its joint graph, which is changed in place.

    Raises:
        UnsupportedModelError: a parameter has other readers beside its cast.
    """
    if not (autocast_dtypes() and torch.is_autocast_cache_enabled()):
        return
    trained = {name for name, each in module.named_parameters() if each.requires_grad}
    cast = {
        role.name
        for node, role in capture.inputs
        if role.kind is RoleKind.PARAMETER
        and role.name in trained
        and any(user.target is _CAST for user in node.users)
    }
    output = capture.joint.graph.output_node()
    returned: Any = output.args[0]
    values = list(returned)
    for place, role in enumerate(capture.output_roles):
        if role is not None and role.kind is RoleKind.PARAMETER_GRADIENT and role.name in cast:
            if values[place].target is not _CAST:
                msg = (
                    f"autocast casts {role.name}, which it reads without the cast, too, or "
                    "several times"
                )
                raise UnsupportedModelError(msg)
            values[place] = values[place].args[0]
    output.args = (tuple(values),)


def casts_of(captured: Capture | Graph) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By name, the parameters whose returned gradient is that of their cast, and this gradient."""
    parameters = {
        role.name: node.meta["val"]
        for node, role in captured.inputs
        if role.kind is RoleKind.PARAMETER
    }
    gradients = {
        role.name: (parameters[role.name], node.meta["val"])
        for node, role in captured.outputs
        if role.kind is RoleKind.PARAMETER_GRADIENT and role.name in parameters
    }
    return {name: pair for name, pair in gradients.items() if pair[0].dtype != pair[1].dtype}
