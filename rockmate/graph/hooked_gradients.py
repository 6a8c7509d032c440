"""Makes the gradients of some parameters whole: of those with a tensor hook, and of shared ones.

A hook (`Tensor.register_hook`) must see the whole gradient at once, so the gradient is neither made
in slices nor early. Contributions of tied uses are added up in the graph, where the sum and its
operands count like other values. The op that makes the sum stands behind the last backward op that
reads the parameter, so that the hook can run at once. Hooks may share what they change, as a random
generator does its state, so these ops stand in the order in which hooks fire in eager.

A parameter to which several gradients flow is treated alike where sums must be eager's bit for bit:
eager adds the gradients to each other first, and then to `.grad`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from rockmate.capture.roles import Capture, RoleKind
from rockmate.graph.fake_values import fake_result
from rockmate.graph.ir import Graph, Op
from rockmate.graph.pass_options import PassOptions


def shared_names(capture: Capture, owner_of: Mapping[str, str]) -> frozenset[str]:
    """Names of the parameters that have more than one gradient: tied weights, repeated calls."""
    owners = Counter(
        owner_of[role.name]
        for role in capture.output_roles
        if role is not None and role.kind is RoleKind.PARAMETER_GRADIENT
    )
    return frozenset(name for name, owner in owner_of.items() if owners[owner] > 1)


def sum_hooked_gradients(capture: Capture, options: PassOptions) -> Capture:
    """A capture that returns one gradient for each hooked parameter, the sum over its uses.

    Its graph is changed in place; a parameter with one gradient stays as it is.
    """
    owners, owner_of = sorted(options.hooked_owners), options.owner_of
    if not owners:
        return capture
    graph = capture.joint.graph
    nodes: list[Any] = list(graph.output_node().args[0])  # pyright: ignore[reportArgumentType]
    roles = [
        role if node is not None else None
        for node, role in zip(nodes, capture.output_roles, strict=True)
    ]
    position = {node: index for index, node in enumerate(graph.nodes)}
    gradients: dict[str, list[int]] = {}  # places of the outputs, by owner
    for place, role in enumerate(roles):
        if role is not None and role.kind is RoleKind.PARAMETER_GRADIENT:
            gradients.setdefault(owner_of[role.name], []).append(place)
    for owner in owners:
        if owner not in gradients:
            continue
        places = sorted(gradients[owner], key=lambda place: position[nodes[place]])
        total = nodes[places[0]]
        for place in places[1:]:
            total = _add(graph, total, nodes[place])
        last = roles[places[-1]]
        assert last is not None
        for place in places:
            nodes[place], roles[place] = None, None
        nodes[places[-1]], roles[places[-1]] = total, replace(last, name=owner)
    graph.output_node().args = (tuple(nodes),)
    return replace(capture, output_roles=tuple(roles))


def defer_hooked_gradients(graph: Graph, options: PassOptions) -> Graph:
    """The graph with each hooked gradient's producer behind the last op that reads the parameter.

    It also stands behind the one before it in eager. A producer whose result is read stays, and
    its hooks wait. The ops' `index` changes in place.
    """
    if not options.hooked_owners:
        return graph
    parameter_at = {
        graph.storage_of[node]: options.owner_of[role.name]
        for node, role in graph.inputs
        if role.kind is RoleKind.PARAMETER
    }
    order, before = list(graph.ops), list[Op]()
    producers = hooked_producers(graph, options)
    for owner, producer in producers:
        producer.keeps_order = len(producers) > 1
        producer.final_gradients.sort(key=itemgetter(0))
        if any(graph.readers.get(storage) for storage in producer.writes):
            continue
        readers = [
            op for op in order if any(parameter_at.get(storage) == owner for storage in op.reads)
        ]
        last = max([producer, *readers, *before], key=order.index)
        if last is not producer:
            order.remove(producer)
            order.insert(order.index(last) + 1, producer)
        before = [producer]
    return graph.with_order(order)


def hooked_producers(graph: Graph, options: PassOptions) -> list[tuple[str, Op]]:
    """The owner of each hooked gradient, and the op that makes it, in the order of the trace.

    A trace has gradients in the order in which autograd hands them over.
    """
    owners, owner_of = options.hooked_owners, options.owner_of
    found = [
        (node, owner_of[role.name], producer)
        for node, role in graph.outputs
        if role.kind is RoleKind.PARAMETER_GRADIENT
        and owner_of[role.name] in owners
        and (producer := graph.storage_of[node].producer)
    ]
    return [(owner, producer) for _, owner, producer in sorted(found, key=itemgetter(0))]


def _add(graph: fx.Graph, left: fx.Node, right: fx.Node) -> fx.Node:
    with graph.inserting_after(right):
        total = graph.call_function(torch.ops.aten.add.Tensor, (left, right))
    total.meta["val"] = fake_result(torch.add, (left, right), {}, like=left)
    return total
