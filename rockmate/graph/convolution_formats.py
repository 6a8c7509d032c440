"""Convolutions of a joint graph by kind, and those that compute on contiguous values.

Where a step has values with channels last, each *kind* of convolution can run in either format: see
`rockmate.ops.convolutions`. A kind is what the call computes (a result, the gradient of its input,
that of its weight) and the sizes of its weight, so it holds for batches of any size.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import layout_of, tensors_of
from rockmate.capture.opaque_call import OpaqueForward
from rockmate.capture.roles import Capture, RoleKind
from rockmate.graph.fake_values import fake_result, refresh, refresh_readers
from rockmate.ops.convolutions import contiguous_convolution, contiguous_convolution_backward
from rockmate.ops.kernel_layouts import CHANNELS_LAST
from rockmate.ops.rng import is_random

_aten = torch.ops.aten
_CONTIGUOUS = {
    _aten.convolution.default: contiguous_convolution,
    _aten.convolution_backward.default: contiguous_convolution_backward,
}
_PLAIN: dict[str, Any] = {"memory_format": torch.contiguous_format}
_FORWARD = _aten.convolution.default


def kind_of(node: fx.Node) -> str:
    """The kind of a convolution's call, in words; empty for other calls."""
    if node.target not in _CONTIGUOUS:
        return ""
    is_forward = node.target is _FORWARD
    args: Any = node.args
    weight = args[1 if is_forward else 2].meta["val"]
    wanted = "result" if is_forward else _gradients(args[-1])
    stride = args[3 if is_forward else 4]
    return f"{wanted} of {_sizes(weight.shape)} by {_sizes(stride)}"


def _gradients(mask: Iterable[bool]) -> str:
    names = ("input", "weight", "bias")
    return "+".join(name for name, is_wanted in zip(names, mask, strict=True) if is_wanted)


def _sizes(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def reads_contiguous(graph: fx.Graph) -> bool:
    """Whether some convolution reads values whose channels could be last and are not."""
    calls = graph.find_nodes(op="call_function", target=_FORWARD)
    values = [_fake(node.args[0]) for node in calls]
    return any(each.ndim in CHANNELS_LAST and not _has_channels_last(each) for each in values)


def may_read_channels_last(graph: fx.Graph) -> bool:
    """Whether convolutions read contiguous values, and no opaque call might see another layout."""
    opaque = (node for node in graph.nodes if isinstance(node.target, OpaqueForward))
    return reads_contiguous(graph) and not any(opaque)


def draws_of(graph: fx.Graph) -> list[Hashable]:
    """What is drawn at random, in order: an element's number depends on the layout."""
    draws = (node for node in graph.nodes if node.op == "call_function" and is_random(node.target))
    return [(node.target, *map(layout_of, tensors_of(node))) for node in draws]


def run_contiguous(graph: fx.Graph, kinds: Collection[str] | None) -> None:
    """Has convolutions that read values with channels last compute on contiguous ones, in place.

    Args:
        graph: a joint graph.
        kinds: of the calls that do so; None for all.
    """
    changed: list[fx.Node] = []
    for node in graph.nodes:
        kind = kind_of(node)
        if not kind or not (kinds is None or kind in kinds):
            continue
        values = node.args[0 if node.target is _FORWARD else 1]
        if not _has_channels_last(_fake(values)):
            continue
        target = _CONTIGUOUS[node.target]
        made = fake_result(target, node.args, node.kwargs, like=node)
        if _strides(made)[0] == _strides(node.meta["val"])[0]:
            node.target = target
            changed.append(node)
    refresh_readers(graph, changed)


def copy_inputs_again(graph: fx.Graph) -> None:
    """Has the backward copy inputs of the step that convolutions read, so that no copy is held."""
    for node in graph.find_nodes(op="call_function", target=_aten.convolution_backward.default):
        copied: Any = node.args[1]
        if copied.target is _aten.clone.default and copied.args[0].op == "placeholder":
            with graph.inserting_before(node):
                again = graph.node_copy(copied)
            refresh(again)
            node.replace_input_with(copied, again)


def lay_out_gradients(
    capture: Capture, hooked: Collection[str], owner_of: Mapping[str, str]
) -> None:
    """Copies whole gradients of parameters to contiguous ones, in place, as eager's are.

    Args:
        capture: of a step with channels last.
        hooked: names of the parameters whose gradients code may look at; others are added to
            `.grad` in its layout.
        owner_of: for each parameter's name, the first name of the same tensor.
    """
    graph = capture.joint.graph
    owners = {owner_of[name] for name in hooked}
    parameters = {
        owner_of[role.name]: node
        for node, role in capture.inputs
        if role.kind is RoleKind.PARAMETER and not role.inner
    }
    returned: Any = graph.output_node().args[0]
    nodes = list(returned)
    for index, role in enumerate(capture.output_roles):
        if role is None or role.kind is not RoleKind.PARAMETER_GRADIENT or role.inner:
            continue
        owner, node = owner_of[role.name], nodes[index]
        if owner not in owners or node is None or _fake(node).is_contiguous():
            continue
        if _fake(parameters[owner]).is_contiguous():
            with graph.inserting_after(node):
                nodes[index] = graph.call_function(_aten.clone.default, (node,), _PLAIN)
            made = fake_result(_aten.clone.default, (node,), _PLAIN, like=node)
            nodes[index].meta["val"] = made
    graph.output_node().args = (tuple(nodes),)


def _fake(value: Any) -> torch.Tensor:
    return value.meta["val"]


def _has_channels_last(fake: torch.Tensor) -> bool:
    memory_format = CHANNELS_LAST.get(fake.ndim)
    return memory_format is not None and fake.is_contiguous(memory_format=memory_format)


def _strides(results: Any) -> list[Any]:
    """Of a result, or of the gradients of values, weight and bias."""
    tensors = (results,) if isinstance(results, torch.Tensor) else results
    return [each if each is None else each.stride() for each in tensors]
