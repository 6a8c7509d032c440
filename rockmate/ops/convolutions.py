"""Convolutions on a CPU with less workspace than ATen's.

Where oneDNN is not used, such as for one small image or in 64 bits, ATen writes out the window of
each result: 27 times the input for a kernel of 3x3x3. These *columns* go into a matrix product.
Slices of them give the same sums, so they are made and multiplied a few at a time:

* the result by depth, each slice with the margin that its windows reach into;
* both gradients by channels of the input.

With one thread that takes less time, too: a slice stays in the cache. A library may add up a thin
slice in another order, so `can_take_slices` compares bits before they are taken.

The gradient of the input needs no values of the input, only its layout. As a call of its own it
does not hold them.
"""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Iterator, Sequence
from math import prod
from typing import Any

import torch

from rockmate._torch.dispatch import makes_columns
from rockmate.ops.kernels import dropout_mask

_aten = torch.ops.aten
# Bytes of the columns that are made at a time. Larger products gain nothing.
SLICE_BYTES = 1 << 21
_LEAST_ROWS = 16  # of a product with columns; thinner ones are added up in another order
Layout = tuple[Sequence[int], Sequence[int]]  # shape and strides
_exact: dict[Hashable, bool] = {}  # by the call without the sizes of its images


def convolution_in_slices(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any
) -> torch.Tensor:
    """`aten.convolution` by depth; arguments and result are its own."""
    stride, padding, dilation, *rest = how
    if not makes_columns(values, weight, *how):
        return _aten.convolution(values, weight, bias, *how)
    depth, reach = values.shape[2], dilation[0] * (weight.shape[2] - 1) + 1
    shape = [
        (size + 2 * pad - step * (kernel - 1) - 1) // jump + 1
        for size, pad, step, kernel, jump in zip(
            values.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
        )
    ]
    result = values.new_empty(values.shape[0], weight.shape[0], *shape)
    for start, stop in _slices(shape[0], column_bytes(result, weight)):
        first = start * stride[0] - padding[0]
        last = (stop - 1) * stride[0] - padding[0] + reach
        part = values[:, :, max(first, 0) : min(last, depth)]
        margins = [max(-first, 0), max(last - depth, 0)]
        if any(margins):
            part = _aten.constant_pad_nd(part, [0, 0, 0, 0, *margins])
        inner = [0, *padding[1:]]
        result[:, :, start:stop] = _aten.convolution(
            part, weight, bias, stride, inner, dilation, *rest
        )
    return result


def convolution_backward_in_slices(
    gradient: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, *options: Any
) -> tuple[torch.Tensor | None, ...]:
    """`aten.convolution_backward` of the weight; arguments and results are its own."""
    bias_sizes, *how, wanted = options
    columns = column_bytes(gradient, weight)
    if columns <= max(SLICE_BYTES, weight.nbytes / 4) or not makes_columns(values, weight, *how):
        return _aten.convolution_backward(gradient, values, weight, *options)
    of_weight, of_bias = torch.empty_like(weight, memory_format=torch.contiguous_format), None
    # A slice of the weight is copied, and so is its gradient.
    for start, stop in _channel_slices(weight, columns + 2 * weight.nbytes):
        part, kernels = values[:, start:stop], weight[:, start:stop]
        mask = [False, True, wanted[2] and not start]
        _, of_weight[:, start:stop], bias = _aten.convolution_backward(
            gradient, part, kernels, bias_sizes, *how, mask
        )
        of_bias = of_bias if start else bias
    return None, of_weight, of_bias


def input_gradient(
    size: Sequence[int],
    layout: Sequence[int],
    gradient: torch.Tensor,
    weight: torch.Tensor,
    *how: Any,
) -> torch.Tensor:
    """The gradient of a convolution's input, of which shape and strides are given.

    The last arguments are those of `aten.convolution` from `stride` on.
    """

    def of(size: Sequence[int], weight: torch.Tensor) -> torch.Tensor:
        values = _without_memory(size, layout, gradient.dtype)
        mask = [True, False, False]
        return _aten.convolution_backward(gradient, values, weight, None, *how, mask)[0]

    if len(size) != 5 or not can_take_slices((size, layout), weight, how, run=False):
        return of(size, weight)
    result = gradient.new_empty(size)
    for start, stop in _channel_slices(weight, column_bytes(gradient, weight)):
        part = size[0], stop - start, *size[2:]
        result[:, start:stop] = of(part, weight[:, start:stop])
    return result


MADE_BY_LAYOUT = {dropout_mask, input_gradient}
"""Functions whose first arguments are the shape and the strides of the result."""


def can_take_slices(values: Layout, weight: torch.Tensor, how: Sequence[Any], *, run: bool) -> bool:
    """Whether a convolution on a CPU makes columns, and its slices have the same bits.

    Bits are compared once for a weight, at the first sizes.

    Args:
        values: shape and strides of the input.
        weight: of the convolution; only its metadata is read.
        how: the arguments of `aten.convolution` from `stride` on.
        run: whether bits are compared; if not, and none were before, they are taken to be equal.
    """
    layouts = values, (list(weight.shape), list(weight.stride()))
    if how[1][0] > how[2][0] * (weight.shape[2] - 1):  # windows of padding alone
        return False
    alike = [_without_memory(*each, weight.dtype) for each in layouts]
    if not makes_columns(alike[0], alike[1], *how):
        return False
    key = str((layouts[1], [*how])), weight.dtype
    if key not in _exact and run:
        _exact[key] = _compared(layouts, weight.dtype, how)
    return _exact.get(key, True)


def _compared(layouts: Sequence[Layout], dtype: torch.dtype, how: Sequence[Any]) -> bool:
    """Whether all kernels give the bits of ATen's for random numbers."""
    generator = torch.Generator().manual_seed(0)
    values, weight = (
        torch.empty_strided(*each, dtype=dtype).normal_(generator=generator) for each in layouts
    )
    result = _aten.convolution(values, weight, None, *how)
    if not torch.equal(convolution_in_slices(values, weight, None, *how), result):
        return False
    gradient = result.normal_(generator=generator)
    options = gradient, values, weight, None, *how
    of_input = _aten.convolution_backward(*options, [True, False, False])[0]
    if not torch.equal(input_gradient(*layouts[0], gradient, weight, *how), of_input):
        return False
    mask = [False, True, False]
    mine: Any = convolution_backward_in_slices(*options, mask)[1]
    return torch.equal(mine, _aten.convolution_backward(*options, mask)[1])


def _without_memory(size: Sequence[int], layout: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor for a call that reads its layout alone: addresses that nothing is written to."""
    extent = 1 + sum((number - 1) * step for number, step in zip(size, layout, strict=True))
    if 0 in size:
        return torch.empty(size, dtype=dtype, device="cpu")
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    addresses = mmap.mmap(-1, extent * dtype.itemsize, flags=private)
    return torch.frombuffer(addresses, dtype=dtype).as_strided(size, layout)


def column_bytes(result: torch.Tensor, weight: torch.Tensor) -> int:
    """Bytes of all windows of a convolution, each written out."""
    num_windows = result.numel() // weight.shape[0]
    return num_windows * prod(weight.shape[1:]) * result.element_size()


def _channel_slices(weight: torch.Tensor, num_bytes: int) -> Iterator[tuple[int, int]]:
    return _slices(weight.shape[1], num_bytes, least=-(-_LEAST_ROWS // prod(weight.shape[2:])))


def _slices(number: int, num_bytes: int, least: int = 1) -> Iterator[tuple[int, int]]:
    """Starts and ends of slices of at least `least`; `num_bytes` are those of all columns."""
    parts = max(1, min(number // least, -(-num_bytes // SLICE_BYTES)))
    return ((i * number // parts, (i + 1) * number // parts) for i in range(parts))
