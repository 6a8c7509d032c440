"""Convolutions that read their input channels last, whatever the model gives them.

The libraries' kernels for channels-last tensors are the faster ones on many machines: nothing is
reordered within. What a convolution makes of such an input is laid out likewise, and most ops pass
a layout on, so that a network of convolutions has one copy at its inlet. Values differ by rounding.

A layout must not show beyond that. What a model makes of `view` is made of a copy where it has to
be; what it returns, and the gradients of its inputs, are laid out as without all this; and a model
that asks how its values lie in memory has no such form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rockmate._torch.storage import version_of
from rockmate.capture.options import MemoryFormat
from rockmate.capture.roles import Capture, RoleKind
from rockmate.errors import UnsupportedModelError
from rockmate.ops.kernel_layouts import CHANNELS_LAST

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


@dataclass(frozen=True, slots=True)
class Formats:
    """How a traced forward lays out values.

    Attributes:
        convolutions: the format in which convolutions read their inputs.
        outputs: layouts of the tensors that the forward gives away; see `output_layouts`.
    """

    convolutions: MemoryFormat = "as_given"
    outputs: tuple[str, ...] = ()

    @property
    def are_changed(self) -> bool:
        """Whether some convolution may read another format than the model gives it."""
        return self.convolutions != "as_given"

    @contextmanager
    def applied(self, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        """Lays out values within, and gradients of the inputs.

        Raises:
            UnsupportedModelError: the layout shows beyond rounding.
        """
        if not self.are_changed:
            yield
            return
        for tensor in inputs:
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient.contiguous())
        mode = _ChannelsLastInputs()
        with mode:
            yield
        mode.check_copies()

    def laid_out(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that a forward gives away, copied where they are in another layout."""
        layouts = [*self.outputs, *[""] * (len(tensors) - len(self.outputs))]
        return list(map(_in_layout, tensors, layouts))


AS_GIVEN = Formats()


def output_layouts(capture: Capture) -> tuple[str, ...]:
    """For each tensor that the forward gives away its dimensions, that of the largest step first.

    They are texts such as "0231", empty for those that have one layout.
    """
    outputs: Any = capture.joint.graph.output_node().args[0]
    layouts = dict[int, str]()
    for node, role in zip(outputs, capture.output_roles, strict=True):
        if role is not None and role.kind is RoleKind.OUTPUT:
            layouts[role.index] = _layout(node.meta["val"])
    return tuple(layouts.get(index, "") for index in range(max(layouts, default=-1) + 1))


def _layout(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided or not 1 < tensor.ndim < 10:
        return ""
    return "".join(map(str, sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))))


def _in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    order = list(map(int, layout))
    steps = [tensor.stride(dim) for dim in order if tensor.shape[dim] != 1]
    steps = [step for step in steps if step != 0]
    if all(step >= later for step, later in pairwise(steps)):
        return tensor
    back = [order.index(dim) for dim in range(tensor.ndim)]
    return tensor.permute(order).contiguous().permute(back)


class _ChannelsLastInputs(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._copied: list[tuple[torch.Tensor, int]] = []

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
        self._copied += [(each, version_of(each)) for each in alike]

    def check_copies(self) -> None:
        """Raises `UnsupportedModelError` if a change would have been seen through a view."""
        if any(version_of(tensor) != version for tensor, version in self._copied):
            raise UnsupportedModelError("the model changes values in place of which it has views")


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy in the format; one without a batch dimension has none."""
    if tensor.ndim not in CHANNELS_LAST:
        return tensor
    return tensor.contiguous(memory_format=CHANNELS_LAST[tensor.ndim])
