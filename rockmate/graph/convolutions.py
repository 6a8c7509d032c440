"""Rewrites of convolutions on a CPU: gradients apart, and slices in place of a large workspace."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import items_of
from rockmate.capture.roles import Capture
from rockmate.graph.pass_options import PassOptions
from rockmate.ops.convolutions import (
    can_take_slices,
    convolution_backward_in_slices,
    convolution_in_slices,
    input_gradient,
)

_CONVOLUTION = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def split_convolution_backwards(graph: fx.Graph) -> None:
    """Makes the gradients of a convolution's input and of its weight in two calls.

    The first reads no input, the second makes nothing of the input's size, so neither holds what
    both together do. On a CPU the libraries run two kernels either way, with the same bits.
    """
    for node in list(graph.find_nodes(op="call_function", target=_BACKWARD)):
        gradient, inputs, weight, _, *how, mask = node.args
        items = items_of(node)
        assert isinstance(inputs, fx.Node)
        values = inputs.meta["val"]
        # The gradient of the bias alone takes as long as the weight's.
        has_bias_alone = mask[2] and not mask[1]
        has_items = 0 in items and len(items) == len(node.users)
        if values.device.type != "cpu" or has_bias_alone or not has_items:
            continue
        of_input: Any = items[0]
        fake = of_input.meta["val"]
        with graph.inserting_before(node):
            layout = list(fake.shape), list(fake.stride())
            apart = graph.call_function(input_gradient, (*layout, gradient, weight, *how))
        apart.meta = dict(of_input.meta)
        of_input.replace_all_uses_with(apart)
        graph.erase_node(of_input)
        node.args = (*node.args[:-1], [False, *mask[1:]])
        node.meta["val"] = (None, *node.meta["val"][1:])
        if not node.users:
            graph.erase_node(node)


def slice_convolutions(capture: Capture, options: PassOptions) -> Capture:
    """Has convolutions that write out their windows do so in slices, where bits are the same.

    The gradients of convolutions are apart. Bits can be compared where the step runs.
    """
    for node in capture.joint.graph.nodes:
        if node.target is _CONVOLUTION:
            values, weight, _, *how = node.args
            target: Any = convolution_in_slices
        elif node.target is _BACKWARD and node.args[-1][1] and not node.args[-1][0]:
            _, values, weight, _, *how, _ = node.args
            target = convolution_backward_in_slices
        else:
            continue
        fake = values.meta["val"]
        layout = list(fake.shape), list(fake.stride())
        is_3d = fake.ndim == 5 and fake.device.type == "cpu"
        if is_3d and can_take_slices(layout, weight.meta["val"], how, run=options.runs_here):
            node.target = target
    return capture
