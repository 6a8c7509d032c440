"""Parameters whose gradient is made whole: those with a tensor hook (`Tensor.register_hook`), which must see all of it at once.

Their gradient goes neither in pieces nor before its time: contributions of tied uses are added up in the graph, where the sum and what
waits for it count like any other value, and it is made behind the last op of the backward that reads the parameter, so that the hook
can run at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rockmate._torch.fake import mode_of
from rockmate.capture.roles import Capture, Role, RoleKind
from rockmate.graph.ir import Graph, Op


def hooked_names(options: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the parameters that are planned for as hooked, among the options of a captured step."""
    return tuple(name for name in options.get("hooked", "").split(",") if name)


def sum_partial_gradients(
    capture: Capture, hooked: Collection[str], owner_of: Mapping[str, str]
) -> Capture:
    """A capture with one gradient for each of the parameters `hooked`, the sum of what its uses contribute.

    Args:
        capture: its graph is changed; the sums that it has already stay.
        hooked: names of parameters.
        owner_of: for each parameter's name the first name of the same tensor.
    """
    owners = {owner_of[name] for name in hooked}
    if not owners:
        return capture
    graph = capture.joint.graph
    nodes: list[Any] = list(graph.output_node().args[0])  # pyright: ignore[reportArgumentType]
    roles = [
        role if node is not None else None
        for node, role in zip(nodes, capture.output_roles, strict=True)
    ]
    position = {node: place for place, node in enumerate(graph.nodes)}
    for owner in sorted(owners):
        places = [
            place
            for place, role in enumerate(roles)
            if role is not None
            and role.kind is RoleKind.PARAMETER_GRADIENT
            and owner_of[role.name] == owner
        ]
        if not places:
            continue
        places.sort(key=lambda place: position[nodes[place]])
        total = nodes[places[0]]
        for place in places[1:]:
            total = _added(graph, total, nodes[place])
        for place in places:
            nodes[place], roles[place] = None, None
        nodes[places[-1]], roles[places[-1]] = total, Role(RoleKind.PARAMETER_GRADIENT, name=owner)
    graph.output_node().args = (tuple(nodes),)
    return replace(capture, output_roles=tuple(roles))


def _added(graph: fx.Graph, left: fx.Node, right: fx.Node) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        total = graph.call_function(torch.ops.aten.add.Tensor, (left, right))
    fake = left.meta["val"]
    with mode_of(fake):
        total.meta.update(val=torch.add(fake, right.meta["val"]))
    return total


def move_last_use_after_readers(
    graph: Graph, hooked: Collection[str], owner_of: Mapping[str, str]
) -> tuple[Graph, set[Op]]:
    """The graph with the gradients of the parameters `hooked` behind all that reads these, and the ops that make them."""
    owners = {owner_of[name] for name in hooked}
    if not owners:
        return graph, set()
    owner_at = {
        graph.storage_of[node]: owner_of[role.name]
        for node, role in graph.inputs
        if role.kind is RoleKind.PARAMETER
    }
    order, makers = list(graph.ops), set[Op]()
    for node, role in graph.outputs:
        maker = graph.storage_of[node].producer
        if (
            role.kind is not RoleKind.PARAMETER_GRADIENT
            or owner_of[role.name] not in owners
            or maker is None
        ):
            continue
        makers.add(maker)
        if any(graph.readers.get(storage) for storage in maker.writes):
            continue
        readers = [
            op
            for op in order
            if any(owner_at.get(storage) == owner_of[role.name] for storage in op.reads)
        ]
        last = max([maker, *readers], key=order.index)
        if last is not maker:
            order.remove(maker)
            order.insert(order.index(last) + 1, maker)
    for index, op in enumerate(order):
        op.index = index
    ordered = replace(graph, ops=tuple(order))
    ordered.verify()
    return ordered, makers
