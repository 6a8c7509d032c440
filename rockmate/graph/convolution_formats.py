"""Joint graphs whose convolutions read channels last: which can, and what they need beside."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import layout_of, tensors_of
from rockmate.capture.opaque_call import OpaqueForward
from rockmate.graph.fake_values import refresh
from rockmate.ops.kernel_layouts import CHANNELS_LAST
from rockmate.ops.rng import is_random

_aten = torch.ops.aten
_PLAIN: dict[str, Any] = {"memory_format": torch.contiguous_format}
_FORWARD = _aten.convolution.default


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


def copy_inputs_again(graph: fx.Graph) -> None:
    """Has the backward copy inputs of the step that convolutions read, so that no copy is held."""
    for node in graph.find_nodes(op="call_function", target=_aten.convolution_backward.default):
        copied: Any = node.args[1]
        if copied.target is _aten.clone.default and copied.args[0].op == "placeholder":
            with graph.inserting_before(node):
                again = graph.node_copy(copied)
            refresh(again)
            node.replace_input_with(copied, again)


def _fake(value: Any) -> torch.Tensor:
    return value.meta["val"]


def _has_channels_last(fake: torch.Tensor) -> bool:
    memory_format = CHANNELS_LAST.get(fake.ndim)
    return memory_format is not None and fake.is_contiguous(memory_format=memory_format)
