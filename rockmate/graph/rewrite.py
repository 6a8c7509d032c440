"""Rewrites of the captured joint graph that give the planner more freedom.

Each changes the graph in place and leaves every number bitwise as it is. `passes.py` lists them in
the order in which they run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import ancestors, calls_in, items_of, storage_ids
from rockmate.capture.roles import Capture, RoleKind
from rockmate.graph.fake_values import fake_result, insert_call, refresh, refresh_views
from rockmate.graph.ir import FORWARD_ENDS, IN_FORWARD
from rockmate.graph.node_marks import is_saved
from rockmate.graph.pass_options import PassOptions
from rockmate.ops.kernel_layouts import CHANNELS_LAST
from rockmate.ops.kernels import cross_entropy_backward, dropout_apply, dropout_mask, fold
from rockmate.ops.rng import is_random

_aten = torch.ops.aten

# A slice is copied if its first reader stands more than so many nodes behind the last reader of
# the other slices.
_MIN_LIVE_DISTANCE = 20
# Ops that give the same bits wherever an element lies: sums of two without a factor, and copies.
_EXACT = {*(_aten.add.Tensor, _aten.cat.default, _aten.clone.default, _aten.slice_backward.default)}

REDUCED_IN_PLACE = (
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default,
)
"""Losses whose scalar result lies in memory as large as what they reduce."""

# Checks that a model makes on values, such as `one_hot` on its classes. They compute nothing.
_VALUE_CHECKS = (
    _aten._assert_async.msg,
    _aten._assert_async.default,
    _aten._assert_tensor_metadata.default,
)


def drop_value_checks(graph: fx.Graph) -> None:
    """Removes the model's checks on values."""
    for target in _VALUE_CHECKS:
        for node in calls_in(graph, target):
            graph.erase_node(node)


def fill_zero_tensors(graph: fx.Graph) -> None:
    """Gives memory to the zeros without any, which are tangents of forward-mode derivatives."""
    for node in calls_in(graph, _aten._efficientzerotensor.default):
        left, node.target = storage_ids(node), _aten.zeros.default
        refresh(node)
        refresh_views(node, left)


def split_dropouts(graph: fx.Graph) -> None:
    """Splits each dropout on CPU into drawing its mask and applying it.

    A saved mask, a quarter of the bytes, then rebuilds the output without the generator. On CPU
    eager runs these very steps; `native_dropout` rounds the factor otherwise. On CUDA it is one
    fused kernel that draws in its own way, so it stays whole.
    """
    for node in calls_in(graph, _aten.native_dropout.default):
        values, probability, training = node.args
        assert isinstance(values, fx.Node)
        fake, items = values.meta["val"], items_of(node)
        if fake.device.type != "cpu" or training is False or 0 not in items:
            continue
        drawn = node.meta["val"][1]
        layout = list(drawn.shape), list(drawn.stride()), fake.device
        with graph.inserting_before(node):
            mask = graph.call_function(dropout_mask, (*layout, probability))
            output = graph.call_function(dropout_apply, (values, mask, probability))
        mask.meta.update({**node.meta, "val": drawn})
        if 1 in items:  # else no gradient goes through it
            _replace(items[1], mask)
        _replace(items[0], output)
        graph.erase_node(node)


def split_dropout_backwards(graph: fx.Graph) -> None:
    """Masks and scales the gradient of a split dropout as eager does on CPU.

    `native_dropout_backward` rounds otherwise in half precision.
    """
    for node in calls_in(graph, _aten.native_dropout_backward.default):
        gradient, mask, _ = node.args
        drawn = _viewed(mask)
        if drawn.target is dropout_mask:
            with graph.inserting_before(node):
                args = (gradient, mask, drawn.args[3])
                natural = fake_result(dropout_apply, args, {}, like=node)
                result = node.meta["val"]
                if natural.stride() != result.stride():  # as where the gradient is transposed
                    args = (*args, _memory_format(result))
                masked = graph.call_function(dropout_apply, args)
            _replace(node, masked)


def _memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The format of a tensor that has one, as the result of each dropout's backward."""
    return torch.contiguous_format if tensor.is_contiguous() else CHANNELS_LAST[tensor.ndim]


def drop_running_statistics(graph: fx.Graph) -> None:
    """Removes the running statistics from the arguments of batch normalisation's backward.

    In training it does not read them, and the forward has overwritten them.
    """
    for node in calls_in(graph, _aten.native_batch_norm_backward.default):
        args: list[Any] = list(node.args)
        if args[7] is True:
            args[3] = args[4] = None
            node.args = tuple(args)


def fuse_cross_entropy_backwards(graph: fx.Graph) -> None:
    """Makes one call of the backwards of `log_softmax` and of what takes one score of each row.

    That is `nll_loss`, or `gather` of one index along the last dim. The gradient between them, of
    the logits' size, then never exists as a whole. It must have no other reader.
    """
    for node in calls_in(graph, _aten._log_softmax_backward_data.default):
        gradient, scores, dim, dtype = node.args
        assert isinstance(gradient, fx.Node)
        assert isinstance(scores, fx.Node)
        fake = scores.meta["val"]
        if len(gradient.users) != 1 or dim not in (fake.ndim - 1, -1) or dtype != fake.dtype:
            continue
        if gradient.target is _aten.scatter_add.default and fake.is_contiguous():
            _fuse_gather_backward(graph, node, gradient, scores)
            continue
        if (
            gradient.target is not _aten.nll_loss_backward.default
            or fake.ndim != 2
            or _viewed(gradient.args[1]) is not _viewed(scores)
        ):
            continue
        loss_gradient, _, *rest = gradient.args
        with graph.inserting_before(node):
            fused = graph.call_function(cross_entropy_backward, (loss_gradient, scores, *rest))
        _replace(node, fused)
        graph.erase_node(gradient)


def _fuse_gather_backward(
    graph: fx.Graph, node: fx.Node, gradient: fx.Node, scores: fx.Node
) -> None:
    """Writes the backward of a `gather` of one score a row as that of `nll_loss`.

    `node` is the backward of `log_softmax` with respect to `scores`, `gradient` the `scatter_add`.
    That adds to zero, so zero is added here: the sign of a zero is the same.
    """
    base, dim, index, source = gradient.args
    fake = scores.meta["val"]
    shape = tuple(fake.shape)
    assert isinstance(base, fx.Node)
    if (
        base.target is not _aten.new_zeros.default
        or dim not in (fake.ndim - 1, -1)
        or any(tuple(each.meta["val"].shape) != (*shape[:-1], 1) for each in (index, source))  # pyright: ignore
    ):
        return

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert_call(graph, target, args, kwargs, like=node)

    with graph.inserting_before(node):
        added = call(_aten.add.Tensor, call(_aten.reshape.default, source, [-1]), 0.0)
        losses = call(_aten.neg.default, added)
        rows = call(_aten.view.default, scores, [-1, shape[-1]])
        target = call(_aten.reshape.default, index, [-1])
        total = call(_aten.ones.default, [], dtype=fake.dtype, device=fake.device)
        fused = call(cross_entropy_backward, losses, rows, target, None, 0, -100, total)
        result = call(_aten.view.default, fused, list(shape))
    node.replace_all_uses_with(result)
    refresh_views(result, storage_ids(node))
    graph.erase_node(node)
    graph.erase_node(gradient)


def copy_out_of_workspaces(graph: fx.Graph) -> None:
    """Copies each scalar loss, and each folded image, out of the memory of what it sums."""
    for node in calls_in(graph, _aten.col2im.default):
        node.target = fold
    for target in REDUCED_IN_PLACE:
        for node in calls_in(graph, target):
            if node.meta["val"].ndim == 0:
                copy_out(node, behind=node)


def copy_slices_read_late(graph: fx.Graph) -> None:
    """Copies a slice that is read long after the other slices of its tensor.

    The other slices' memory is then released. The gradient of a concatenation is read so: the part
    of a U-Net's skip waits until the backward reaches the skip's beginning. The copy stands behind
    the last reader of the other slices. A view counts as a reader. Placeholders and constants stay:
    their memory is held in any case. So do slices whose readers round by their strides.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    held = {
        storage
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
        for storage in storage_ids(node)
    }
    for node in list(graph.nodes):
        slices = [user for user in node.users if user.target is _aten.slice.Tensor and user.users]
        if len(slices) < max(2, len(node.users)) or not held.isdisjoint(storage_ids(node)):
            continue
        readers = {part: sorted(part.users, key=order.__getitem__) for part in slices}
        for part in slices:
            last_reads = [readers[other][-1] for other in slices if other is not part]
            last = max(last_reads, key=order.__getitem__)
            is_late = order[readers[part][0]] > order[last] + _MIN_LIVE_DISTANCE
            if is_late and _rounds_in_any_strides(part):
                copy_out(part, behind=max(last, part, key=order.__getitem__))


def _rounds_in_any_strides(node: fx.Node) -> bool:
    """Whether all that reads a tensor gives the same bits wherever its elements lie.

    Kernels have vectors of a contiguous row, and functions of theirs round otherwise than of one
    element; sums add in another order.
    """
    own = set(storage_ids(node))
    return all(
        (reader.target in _EXACT and not reader.kwargs)
        or (not own.isdisjoint(storage_ids(reader)) and _rounds_in_any_strides(reader))
        for reader in node.users
    )


def has_dense_layout(tensor: torch.Tensor) -> bool:
    """Whether a copy has the same strides: no two elements share memory, and there are no gaps."""
    return torch.empty_like(tensor).stride() == tensor.stride()


def copy_out(node: fx.Node, *, behind: fx.Node) -> fx.Node:
    """Gives the readers of a tensor a copy of it, in memory of its own size; returns the copy.

    Args:
        node: makes the tensor.
        behind: the copy stands behind this call, which is `node` or a later one. All readers of the
            tensor stand behind it, too.
    """
    graph, users = node.graph, list(node.users)
    with graph.inserting_after(behind):
        copy = graph.call_function(_aten.clone.default, (node,))
    value = fake_result(torch.empty_like, (node,), {}, like=node)
    copy.meta = {**node.meta, "val": value}
    for user in users:
        user.replace_input_with(node, copy)
    refresh_views(copy, storage_ids(node))
    return copy


def _replace(node: fx.Node, other: fx.Node) -> None:
    """Puts `other` in the place of a node that returns the same."""
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _viewed(node: Any) -> Any:
    """The node that a chain of detached aliases begins with."""
    while isinstance(node, fx.Node) and node.target in (_aten.detach.default, _aten.alias.default):
        node = node.args[0]
    return node


def copy_inputs_of_the_forward(capture: Capture, options: PassOptions) -> Capture:
    """Copies each input that the forward reads and no gradient needs.

    A training script may overwrite an input between the forward and the backward: `x.div_(255)`, a
    buffer that a loader fills again, a NumPy array that shares memory with it. Autograd saves an
    input only for a gradient that needs its values. So eager does not mind where no gradient does,
    and a recomputation from the input would. The readers of such an input read a copy, which is
    made once, in the forward. Its bytes count like those of any saved value.

    Inputs that are returned, and those that the forward overwrites, stay as they are: the user's
    tensor itself is then the result.
    """
    if options.keeps_inputs:
        return capture
    forward = forward_nodes(capture)
    updated = {role.index for _, role in capture.outputs if role.kind is RoleKind.INPUT_UPDATE}
    returned = {storage for node, _ in capture.outputs for storage in storage_ids(node)}
    last_placeholder = list(capture.joint.graph.find_nodes(op="placeholder"))[-1]
    for node, role in capture.inputs:
        if role.kind is not RoleKind.INPUT or role.index in updated:
            continue
        readers = _readers(node)
        is_copied = readers and readers <= forward and returned.isdisjoint(storage_ids(node))
        if is_copied and storage_ids(node) and has_dense_layout(node.meta["val"]):
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


def forward_nodes(capture: Capture) -> set[fx.Node]:
    """The nodes that run in the forward; see `Phase`."""
    ends = [node for node, role in capture.outputs if role.kind in FORWARD_ENDS]
    ends += [
        node
        for node in capture.joint.graph.nodes
        if is_random(node.target) or node.meta.get(IN_FORWARD) or is_saved(node)
    ]
    return ancestors(ends)
