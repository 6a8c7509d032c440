"""Convolutions that read their input channels last, whatever the model gives them.

The libraries' kernels for channels-last tensors are the faster ones on many machines: nothing is
reordered within. What a convolution makes of such an input is laid out likewise, and most ops pass
a layout on, so that a network of convolutions has one copy at its inlet. Values differ by rounding.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

MemoryFormat = Literal["as_given", "channels_last"]

_CONVOLUTIONS = {
    functional.conv2d, functional.conv3d, functional.conv_transpose2d, functional.conv_transpose3d
}  # fmt: skip
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolutions_in(memory_format: MemoryFormat) -> AbstractContextManager[Any]:
    """Has convolutions within read their inputs in a format."""
    return _ChannelsLastInputs() if memory_format == "channels_last" else nullcontext()


class _ChannelsLastInputs(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _CONVOLUTIONS:
            if args:
                args = (_channels_last(args[0]), *args[1:])
            else:
                kwargs["input"] = _channels_last(kwargs["input"])
        return func(*args, **kwargs)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy in the format; one without a batch dimension has none."""
    if tensor.ndim not in _FORMATS:
        return tensor
    return tensor.contiguous(memory_format=_FORMATS[tensor.ndim])
