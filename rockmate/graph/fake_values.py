"""Fake results of calls that a pass adds to a joint graph or moves to other memory.

A node's `meta["val"]` has the result of its call as fake tensors: shapes, dtypes, layouts, and
which of them share a storage. A pass that adds a call, or gives a view another base, keeps that
true with these functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from rockmate._torch.autocast import autocast_off
from rockmate._torch.fake import mode_of
from rockmate.capture.nodes import storage_ids, tensors_of
from rockmate.ops.kernels import cross_entropy_backward, dropout_apply

_aten = torch.ops.aten


def _masked(
    values: torch.Tensor,
    mask: torch.Tensor,
    _: float,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    return torch.mul(values, mask).clone(memory_format=memory_format)


# For a kernel, a call whose result has the same layout. These kernels read values, which fake
# tensors lack, or they take many steps.
STAND_INS: dict[Any, Any] = {
    dropout_apply: _masked,
    cross_entropy_backward: lambda _, scores, *__: torch.empty_like(scores),
}


# Normalizations, each with the positions of its results that are statistics of the input, then of
# those that are running statistics, which stand among its arguments from position 3.
_STATISTICS: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {
    _aten.native_batch_norm.default: ((1, 2), ()),
    _aten._native_batch_norm_legit.default: ((1, 2), ()),
    _aten._native_batch_norm_legit.no_stats: ((1, 2), ()),
    _aten._native_batch_norm_legit_functional.default: ((1, 2), (3, 4)),
    _aten._batch_norm_with_update_functional.default: ((1, 2), (4, 5)),
    _aten.native_layer_norm.default: ((1, 2), ()),
    _aten.native_group_norm.default: ((1, 2), ()),
}

# Calls whose result the kernel lays out like the argument at a position, and PyTorch's fake one
# like another, where one of them is in a channels-last format and the other is not.
_LAID_OUT_LIKE: dict[Any, int] = {
    _aten.elu_backward.default: 0,
    _aten.hardsigmoid_backward.default: 0,
    _aten.hardswish_backward.default: 0,
    _aten.hardtanh_backward.default: 0,
    _aten.native_batch_norm_backward.default: 1,
    _aten.native_group_norm_backward.default: 1,
    _aten.softplus_backward.default: 0,
}


def fake_result(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, like: fx.Node
) -> Any:
    """The result of a call on the fake values of the nodes among its arguments.

    Statistics that a normalization saves have the dtypes of kernels, and results their layouts.

    Args:
        target: the function to call.
        args: its arguments.
        kwargs: its keywords.
        like: a node of the graph, whose fake mode serves for calls that take no tensor.
    """
    given = fx.map_arg((args, dict(kwargs)), lambda argument: argument.meta["val"])
    with mode_of(tensors_of(like)[0]), torch.no_grad(), autocast_off():
        result = STAND_INS.get(target, target)(*given[0], **given[1])
        return _laid_out(target, given[0], _with_statistics(target, given[0], result))


def _laid_out(target: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The result of a call in the layout that the kernel gives it; of norms on a CPU alone."""
    position = _LAID_OUT_LIKE.get(target)
    if position is None or (position and args[position].device.type != "cpu"):
        return result
    laid_out, *others = (result,) if isinstance(result, torch.Tensor) else result
    if laid_out is not None and _steps(laid_out) != _steps(args[position]):
        own = memory_format(args[position]) or torch.preserve_format
        laid_out = torch.empty_like(laid_out, memory_format=own)
    return laid_out if isinstance(result, torch.Tensor) else (laid_out, *others)


def _with_statistics(target: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The results of a normalization, with statistics in the dtypes that CPU kernels give them.

    Of an input in half precision, kernels save statistics in the precision of the parameters or
    running statistics, and the latter keep their dtype. PyTorch's fake results have the input's
    dtype, and 32 bits, in their place.
    """
    if target is _aten.native_group_norm_backward.default:  # the input's, whatever the statistics'
        return (result[0].to(args[1].dtype), *result[1:])
    saved, running = _STATISTICS.get(target, ((), ()))
    if not saved:
        return result
    given, *others = [each for each in args if isinstance(each, torch.Tensor)]
    if given.device.type != "cpu" or given.dtype not in (torch.bfloat16, torch.float16):
        return result
    precise = next((each.dtype for each in others if each.dtype == torch.float32), given.dtype)
    dtypes = dict.fromkeys(saved, precise)
    for position, source in zip(running, args[3:5], strict=False):
        dtypes[position] = source.dtype
    return tuple(
        each.to(dtypes[position]) if position in dtypes else each
        for position, each in enumerate(result)
    )


def memory_format(tensor: torch.Tensor) -> torch.memory_format | None:
    """The format of a dense tensor; None if it is in none."""
    formats = [torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(tensor.ndim, [])
    return next((each for each in formats if tensor.is_contiguous(memory_format=each)), None)


def correct_results(graph: fx.Graph) -> None:
    """Gives fake results the dtypes and layouts that kernels give; see `fake_result`."""
    wrong = [
        node
        for node in graph.nodes
        if node.target in _STATISTICS or node.target in _LAID_OUT_LIKE
        if _forms(node.meta["val"])
        != _forms(fake_result(node.target, node.args, node.kwargs, like=node))
    ]
    # What stands in the memory of a result follows it, so all that reads one is made again.
    refreshed = set(wrong)
    for node in graph.nodes if wrong else ():
        if node.op == "call_function" and (
            node in refreshed or not refreshed.isdisjoint(node.all_input_nodes)
        ):
            refresh(node)
            refreshed.add(node)


def _forms(values: Any) -> list[Any]:
    tensors = (values,) if isinstance(values, torch.Tensor) else values
    return [each if each is None else (each.dtype, _steps(each)) for each in tensors]


def _steps(tensor: torch.Tensor) -> str:
    """The strides as text, since to compare symbols would fix them."""
    return str(tuple(tensor.stride()))


def refresh(node: fx.Node) -> None:
    """Sets a node's fake value again from those of its arguments."""
    node.meta["val"] = fake_result(node.target, node.args, node.kwargs, like=node)


def refresh_views(node: fx.Node, left: Collection[int]) -> None:
    """Refreshes the views of a node that has replaced another.

    Args:
        node: the node, with its readers.
        left: storages of the replaced node. The readers' fake values still lie in them.
    """
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "call_function" and not set(storage_ids(user)).isdisjoint(left):
                refresh(user)
                pending.append(user)
