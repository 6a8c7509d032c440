"""Copies of inputs for recomputations.

A training script may overwrite an input between the forward and the backward: `x.div_(255)`, a
buffer that a loader fills again, a NumPy array that shares memory with it. Autograd saves an input
only for a gradient that needs its values. So eager does not mind where no gradient does, and a
recomputation from the input would.

The readers of such an input read a copy, which is made once, in the forward. Its bytes count like
those of any saved value. If a gradient needs the input itself, autograd saves it in eager as in a
planned step, and refuses a backward after it was overwritten.
"""

from __future__ import annotations

from torch import fx

from rockmate.capture.nodes import ancestors, storage_ids
from rockmate.capture.roles import Capture, RoleKind
from rockmate.graph.ir import FORWARD_ENDS, IN_FORWARD
from rockmate.graph.node_marks import is_saved
from rockmate.graph.rewrite import copy_out, has_dense_layout
from rockmate.ops.rng import is_random


def copy_inputs_of_the_forward(capture: Capture) -> Capture:
    """Copies each input that the forward reads and no gradient needs.

    Inputs that are returned, and those that the forward overwrites, stay as they are: the user's
    tensor itself is then the result.
    """
    forward = _forward_nodes(capture)
    updated = {role.index for _, role in capture.outputs if role.kind is RoleKind.INPUT_UPDATE}
    returned = {storage for node, _ in capture.outputs for storage in storage_ids(node)}
    last_placeholder = list(capture.joint.graph.find_nodes(op="placeholder"))[-1]
    for node, role in capture.inputs:
        if role.kind is not RoleKind.INPUT or role.index in updated:
            continue
        readers = _readers(node)
        is_copied = readers and readers <= forward and returned.isdisjoint(storage_ids(node))
        if is_copied and has_dense_layout(node.meta["val"]):
            copy_out(node, behind=last_placeholder).meta[IN_FORWARD] = True
    return capture


def _readers(node: fx.Node) -> set[fx.Node]:
    """The calls that read a tensor or a view of it, views aside."""
    storages, readers, pending = set(storage_ids(node)), set[fx.Node](), [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "call_function" and storages.isdisjoint(storage_ids(user)):
                readers.add(user)
            elif user.op == "call_function":
                pending.append(user)
    return readers


def _forward_nodes(capture: Capture) -> set[fx.Node]:
    """The nodes that run in the forward; see `Phase`."""
    ends = [node for node, role in capture.outputs if role.kind in FORWARD_ENDS]
    ends += [
        node
        for node in capture.joint.graph.nodes
        if is_random(node.target) or node.meta.get(IN_FORWARD) or is_saved(node)
    ]
    return ancestors(ends)
