"""Changes to the captured graph that give the planner more freedom and leave every number as it is, bitwise.

Checks that the model makes on values (`one_hot` on its classes) are left out: they compute nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rockmate._torch.fake import mode_of
from rockmate.capture.nodes import storage_ids
from rockmate.graph.value_numbering import clean
from rockmate.ops.kernels import cross_entropy_backward, dropout_apply, dropout_mask

_aten = torch.ops.aten
_FAR = 20  # nodes, behind which what is read of a gradient is worth a copy
_REDUCED_IN_PLACE = (
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.binary_cross_entropy.default,
)


def rewrite(joint: fx.GraphModule) -> None:
    """Applies every rewrite, in place."""
    for node in list(joint.graph.nodes):
        if node.target is _aten.native_dropout.default:
            _split_dropout(node)
        elif node.target is _aten.native_dropout_backward.default:
            _apply_dropout_to_gradient(node)
        elif node.target in (
            _aten._assert_async.msg,
            _aten._assert_async.default,
            _aten._assert_tensor_metadata.default,
        ):
            joint.graph.erase_node(node)
        elif node.target is _aten.native_batch_norm_backward.default:
            _forget_running_statistics(node)
        elif node.target is _aten._log_softmax_backward_data.default:
            _fuse_cross_entropy_backward(node)
        elif node.target is _aten.convolution_backward.default:
            _split_convolution_backward(node)
    clean(joint.graph)
    for node in list(joint.graph.nodes):
        if node.target in _REDUCED_IN_PLACE and node.meta["val"].ndim == 0:
            _copy_out(node)
    _copy_slices_read_late(joint.graph)


def _split_dropout(node: fx.Node) -> None:
    """Draws the mask apart from applying it, so that a kept mask (a quarter of the bytes) rebuilds the output without the generator.

    On CPU `native_dropout` is these very steps. On CUDA it is one fused kernel with its own way of drawing, so it stays whole.
    """
    values, probability, training = node.args
    assert isinstance(values, fx.Node)
    fake = values.meta["val"]
    items = {user.args[1]: user for user in node.users}
    if fake.device.type != "cpu" or training is False or 0 not in items or 1 not in items:
        return
    mask_fake = items[1].meta["val"]
    graph = node.graph
    with graph.inserting_before(node):
        mask = graph.call_function(
            dropout_mask,
            (list(mask_fake.shape), list(mask_fake.stride()), fake.device, probability),
        )
        output = graph.call_function(dropout_apply, (values, mask, probability))
    _replace(items[1], mask)
    _replace(items[0], output)
    graph.erase_node(node)


def _apply_dropout_to_gradient(node: fx.Node) -> None:
    """Masks and scales the gradient as eager does on CPU, where `native_dropout_backward` rounds otherwise in half precision."""
    gradient, mask, _ = node.args
    drawn = _viewed(mask)
    if drawn.target is dropout_mask:
        with node.graph.inserting_before(node):
            masked = node.graph.call_function(dropout_apply, (gradient, mask, drawn.args[3]))
        _replace(node, masked)


def _replace(old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def _forget_running_statistics(node: fx.Node) -> None:
    """In training the backward of batch normalisation does not read the running statistics, which the forward has overwritten."""
    args: list[Any] = list(node.args)
    if args[7] is True:
        args[3] = args[4] = None
        node.args = tuple(args)


def _fuse_cross_entropy_backward(node: fx.Node) -> None:
    """Takes the backwards of `nll_loss` and `log_softmax` in one step where the first has no other use."""
    gradient, scores, dim, dtype = node.args
    if not (
        isinstance(gradient, fx.Node)
        and isinstance(scores, fx.Node)
        and gradient.target is _aten.nll_loss_backward.default
    ):
        return
    fake = scores.meta["val"]
    if len(gradient.users) != 1 or fake.ndim != 2 or dim not in (1, -1) or dtype != fake.dtype:
        return
    if _viewed(gradient.args[1]) is not _viewed(scores):
        return
    loss_gradient, _, *rest = gradient.args
    with node.graph.inserting_before(node):
        fused = node.graph.call_function(cross_entropy_backward, (loss_gradient, scores, *rest))
    _replace(node, fused)
    node.graph.erase_node(gradient)


def _split_convolution_backward(node: fx.Node) -> None:
    """Takes the gradients of a convolution's input and of its weight in two calls.

    The one needs no input, the other makes nothing of the input's size, so neither holds what both do. On CPU the libraries run two kernels
    either way, and the results are the same bits.
    """
    *args, mask = node.args
    values = node.meta["val"]
    assert isinstance(mask, list | tuple)
    if (
        not (mask[0] and mask[1])
        or values[0].device.type != "cpu"
        or any(user.target is not operator.getitem for user in node.users)
    ):
        return
    parts = []
    for wanted in ([True, False, False], [False, *mask[1:]]):
        with node.graph.inserting_before(node):
            part = node.graph.call_function(node.target, (*args, wanted))  # pyright: ignore[reportArgumentType]
        part.meta = dict(node.meta)
        part.meta["val"] = tuple(
            value if is_wanted else None for value, is_wanted in zip(values, wanted, strict=True)
        )
        parts.append(part)
    for user in list(node.users):
        user.replace_input_with(node, parts[0] if user.args[1] == 0 else parts[1])
    node.graph.erase_node(node)


def _copy_out(node: fx.Node, behind: fx.Node | None = None) -> None:
    """Hands a copy of a tensor on, in memory of its own size.

    A kernel that reduces a loss returns a number in memory as large as what it reduces; a slice holds what it is a slice of.

    Args:
        node: makes the tensor.
        behind: the call after which it is copied, no earlier than `node` and with all of the tensor's readers yet to come; `node` if None.
    """
    users = list(node.users)
    with node.graph.inserting_after(behind or node):
        copy = node.graph.call_function(_aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    with mode_of(node.meta["val"]):
        copy.meta["val"] = torch.empty_like(node.meta["val"])
    for user in users:
        user.replace_input_with(node, copy)
    _move_views(copy, set(storage_ids(node)))


def _move_views(node: fx.Node, left: set[int]) -> None:
    """Makes what is known of the views of a copy anew, which are no longer in the memory that has been left."""
    moved = [node]
    while moved:
        base = moved.pop()
        for user in base.users:
            if not left.isdisjoint(storage_ids(user)):
                args, kwargs = fx.map_arg(
                    (user.args, user.kwargs), lambda argument: argument.meta["val"]
                )
                assert callable(user.target)
                with mode_of(node.meta["val"]):
                    user.meta["val"] = user.target(*args, **kwargs)
                moved.append(user)


def _copy_slices_read_late(graph: fx.Graph) -> None:
    """Copies what is read long after the rest of a tensor that is read in slices, so that the rest can go.

    The gradient of a concatenation is read so: the part of a U-Net's skip waits until the backward comes to where the skip was made.
    The rest is needed until its own last reader has run, so the copy is made behind that (a view counts as a reader).
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    given = [storage_ids(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    held = set().union(*given)  # by somebody else, so that nothing would go
    for node in list(graph.nodes):
        slices = [user for user in node.users if user.target is _aten.slice.Tensor and user.users]
        if (
            len(slices) < 2
            or len(slices) < len(node.users)
            or not held.isdisjoint(storage_ids(node))
        ):
            continue
        readers = {part: sorted(part.users, key=order.__getitem__) for part in slices}
        for part in slices:
            rest_read = max(
                (readers[other][-1] for other in slices if other is not part), key=order.__getitem__
            )
            if order[readers[part][0]] > order[rest_read] + _FAR:
                _copy_out(part, behind=max(rest_read, part, key=order.__getitem__))


def _viewed(node: Any) -> Any:
    """What `node` is a detached alias of."""
    while isinstance(node, fx.Node) and node.target in (_aten.detach.default, _aten.alias.default):
        node = node.args[0]
    return node
