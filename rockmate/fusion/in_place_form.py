"""The in-place form of a group: its first result in the memory of an input, as a graph."""

from __future__ import annotations

import copy

import torch
from torch import fx

from rockmate._torch.fake import mode_of
from rockmate._torch.inductor import CompilationError

_aten = torch.ops.aten


def writing(traced: fx.GraphModule, position: int) -> fx.GraphModule:
    """A graph that copies its first result into an input, and returns the others.

    What is computed from the result, such as the sum of a bias's gradient, reads it in the memory
    of the input, so that it need not exist beside it. That is not possible for a call which reads
    the input, too; then the copy is the last call.

    Args:
        traced: a group in Inductor's ops; it is not changed.
        position: of the input.

    Raises:
        CompilationError: there is no such view.
    """
    module = copy.deepcopy(traced)
    graph = module.graph
    target = [node for node in graph.nodes if node.op == "placeholder"][position]
    output = graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple | list)
    first, *rest = results
    assert isinstance(first, fx.Node)
    later = _dependents(first, output)
    is_read_later = any(reader in later for reader in target.users)
    output.args = (tuple(rest),)
    with graph.inserting_before(output):
        shaped = _shaped(graph, first, like=target)
        written = graph.call_function(_aten.copy_.default, (target, shaped))
        written.meta["val"] = target.meta["val"]
        read = written if is_read_later else _shaped(graph, written, like=first)
    if not is_read_later:
        for node in [each for each in graph.nodes if each in later]:
            output.prepend(node)
            node.replace_input_with(first, read)
        output.replace_input_with(first, read)
    module.recompile()
    return module


def _shaped(graph: fx.Graph, node: fx.Node, *, like: fx.Node) -> fx.Node:
    """A view of a node in the shape of another.

    Raises:
        CompilationError: Inductor lays the node out otherwise than captured, where it has a view.
    """
    value, shape = node.meta["val"], list(like.meta["val"].shape)
    if list(value.shape) == shape:
        return node
    if not value.is_contiguous():
        raise CompilationError(f"{node} has strides {value.stride()}")
    view = graph.call_function(_aten.view.default, (node, shape))
    with mode_of(value):
        view.meta["val"] = value.view(shape)
    return view


def _dependents(node: fx.Node, output: fx.Node) -> set[fx.Node]:
    """The calls that depend on a node."""
    found, pending = set[fx.Node](), [node]
    while pending:
        new = [user for user in pending.pop().users if user is not output and user not in found]
        found.update(new)
        pending += new
    return found
