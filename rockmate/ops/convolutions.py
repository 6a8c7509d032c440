"""Convolutions that compute on contiguous values where a step has values with channels last.

A library has a kernel for each format, and which is faster depends on the sizes: with many channels
and few pixels the copies of the values are small beside what the other kernel reorders of the
weight. Results are laid out as without the copies, but for gradients of weights: these are
contiguous, as the weights are.
"""

from __future__ import annotations

from typing import Any

import torch

from rockmate.ops.kernel_layouts import CHANNELS_LAST, contiguous_strides

_aten = torch.ops.aten


def contiguous_convolution(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any
) -> torch.Tensor:
    """`aten.convolution` on a copy of the values; the result has channels last."""
    made = _aten.convolution(values.contiguous(), weight, bias, *settings)
    return made.contiguous(memory_format=CHANNELS_LAST[made.ndim])


def contiguous_convolution_backward(
    gradient: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """`aten.convolution_backward` on copies; a gradient of the values has channels last."""
    *_, mask = settings
    if mask[1] or not values.is_contiguous(memory_format=CHANNELS_LAST[values.ndim]):
        values = values.contiguous()
    else:  # only the sizes and the format count
        values = values.as_strided(values.shape, contiguous_strides(values.shape))
    made, *others = _aten.convolution_backward(gradient.contiguous(), values, weight, *settings)
    if made is not None:
        made = made.contiguous(memory_format=CHANNELS_LAST[made.ndim])
    return made, *others
