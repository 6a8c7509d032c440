"""Convolutions that read their input channels last, whatever the model gives them.

The libraries' kernels for channels-last tensors are the faster ones on many machines: nothing is
reordered within. What a convolution makes of such an input is laid out likewise, and most ops pass
a layout on, so that a network of convolutions has one copy at its inlet. Values differ by rounding.

A layout must not show beyond that. What a model makes of `view` is made of a copy where it has to
be; what it returns, and the gradients of its inputs, are contiguous; and a model that asks how its
values lie in memory has no such form.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rockmate._torch.storage import version_of
from rockmate.capture.nodes import layout_of, tensors_of
from rockmate.capture.opaque_call import OpaqueForward
from rockmate.capture.roles import Capture, RoleKind
from rockmate.errors import UnsupportedModelError
from rockmate.ops.convolutions import convolution_in_slices
from rockmate.ops.kernel_layouts import CHANNELS_LAST
from rockmate.ops.rng import is_random

_CONVOLUTIONS = {
    functional.conv2d, functional.conv3d, functional.conv_transpose2d, functional.conv_transpose3d
}  # fmt: skip
_VIEWS = {torch.Tensor.view, torch.Tensor.view_as}
# These return the tensor itself, a view or a copy, by its layout.
_MAY_COPY = {
    torch.Tensor.contiguous, torch.Tensor.flatten, torch.Tensor.ravel, torch.Tensor.reshape,
    torch.Tensor.reshape_as, torch.flatten, torch.ravel, torch.reshape,
}  # fmt: skip
_TELL_LAYOUT: dict[Any, str] = {
    torch.Tensor.as_strided: "as_strided",
    torch.Tensor.dim_order: "dim_order",
    torch.Tensor.is_contiguous: "is_contiguous",
    torch.Tensor.resize_: "resize_",
    torch.Tensor.set_: "set_",
    torch.Tensor.storage_offset: "storage_offset",
    torch.Tensor.stride: "stride",
    torch.Tensor.untyped_storage: "untyped_storage",
    torch.as_strided: "as_strided",
}


@contextmanager
def convolutions_read_channels_last(inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Has convolutions do so within, and gradients of the inputs be contiguous.

    Raises:
        UnsupportedModelError: the layout shows beyond rounding.
    """
    for tensor in inputs:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient.contiguous())
    mode = _ChannelsLastInputs()
    with mode:
        yield
    if any(version_of(tensor) != version for tensor, version in mode.copied):
        raise UnsupportedModelError("the model changes values in place of which it has views")


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """What the forward gives away, copied if its channels are last."""
    return tensor.contiguous() if _has_channels_last(tensor) else tensor


# --- which steps may ------------------------------------------------------------------------------


def reads_contiguous(graph: fx.Graph) -> bool:
    """Whether some convolution reads values whose channels could be last and are not."""
    targets = torch.ops.aten.convolution.default, convolution_in_slices
    calls = [graph.find_nodes(op="call_function", target=target) for target in targets]
    values: list[Any] = [node.args[0] for found in calls for node in found]
    fakes = [value.meta["val"] for value in values]
    return any(each.ndim in CHANNELS_LAST and not _has_channels_last(each) for each in fakes)


def may_read_channels_last(graph: fx.Graph) -> bool:
    """Whether convolutions read contiguous values, and no opaque call might see another layout."""
    opaque = (node for node in graph.nodes if isinstance(node.target, OpaqueForward))
    return reads_contiguous(graph) and not any(opaque)


def draws_of(graph: fx.Graph) -> list[Hashable]:
    """What is drawn at random, in order: an element's number depends on the layout."""
    draws = (node for node in graph.nodes if node.op == "call_function" and is_random(node.target))
    return [(node.target, *map(layout_of, tensors_of(node))) for node in draws]


def output_layouts(capture: Capture) -> list[tuple[int, ...]]:
    """For each tensor that the forward gives away its dims, that of the largest step first."""
    outputs: Any = capture.joint.graph.output_node().args[0]
    return [
        _layout(node.meta["val"])
        for node, role in zip(outputs, capture.output_roles, strict=True)
        if role is not None and role.kind is RoleKind.OUTPUT
    ]


def _layout(fake: torch.Tensor) -> tuple[int, ...]:
    if fake.layout is not torch.strided:
        return ()
    return tuple(sorted(range(fake.ndim), key=lambda d: (fake.shape[d] == 1, -fake.stride(d))))


def _has_channels_last(tensor: torch.Tensor) -> bool:
    memory_format = CHANNELS_LAST.get(tensor.ndim)
    return memory_format is not None and tensor.is_contiguous(memory_format=memory_format)


# --- while a forward is traced --------------------------------------------------------------------


class _ChannelsLastInputs(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _TELL_LAYOUT:
            msg = f"the model calls {_TELL_LAYOUT[func]}, which tells its values' layout"
            raise UnsupportedModelError(msg)
        if func in _CONVOLUTIONS:
            if args:
                args = (_channels_last(args[0]), *args[1:])
            else:
                kwargs["input"] = _channels_last(kwargs["input"])
        elif func in _VIEWS:
            return self._view(func, *args, **kwargs)
        result = func(*args, **kwargs)
        if func in _MAY_COPY:
            given = args[0] if args else kwargs["input"]
            if result is not given and not result._is_view():
                self._note_copy(given, result)
        return result

    def _view(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A view of the tensor, or of a copy."""
        try:
            return func(tensor, *args, **kwargs)
        except (RuntimeError, ValueError):
            copy = tensor.contiguous()
            view = func(copy, *args, **kwargs)
        self._note_copy(tensor, copy)
        return view

    def _note_copy(self, *alike: torch.Tensor) -> None:
        self.copied += [(each, version_of(each)) for each in alike]


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy in the format; one without a batch dimension has none."""
    if tensor.ndim not in CHANNELS_LAST:
        return tensor
    return tensor.contiguous(memory_format=CHANNELS_LAST[tensor.ndim])
