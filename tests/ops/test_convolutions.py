"""Convolutions in slices and gradients without their input: ATen's bits, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rockmate._torch.allocator import peak_beyond_result
from rockmate._torch.pytree import tree_leaves
from rockmate.ops import convolutions
from rockmate.ops.convolutions import (
    SLICE_BYTES,
    can_take_slices,
    column_bytes,
    convolution_backward_in_slices,
    convolution_in_slices,
    input_gradient,
)

aten = torch.ops.aten
CPU = torch.device("cpu")


def options(stride: int = 1, padding: int = 1, dilation: int = 1, num_dims: int = 3) -> list[Any]:
    return [*([each] * num_dims for each in (stride, padding, dilation)), False, [0] * num_dims, 1]


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = {
    "plain": ((1, 16, 24, 24, 24), (16, 16, 3, 3, 3), options()),
    "steps": ((1, 16, 21, 32, 65), (16, 16, 3, 3, 3), options(stride=2)),
    "without padding": ((1, 16, 24, 24, 24), (8, 16, 3, 3, 3), options(padding=0)),
    "dilated": ((1, 16, 24, 24, 24), (8, 16, 3, 3, 3), options(padding=2, dilation=2)),
    "flat": ((1, 16, 40, 32, 32), (16, 16, 1, 3, 3), [[1] * 3, [0, 1, 1], *options()[2:]]),
    "wide kernel": ((1, 16, 20, 20, 20), (8, 16, 5, 3, 3), [[1] * 3, [2, 1, 1], *options()[2:]]),
}


def layout_of(values: Tensor) -> tuple[list[int], list[int]]:
    return list(values.shape), list(values.stride())


def drawn(name: str) -> tuple[Tensor, Tensor, list[Any]]:
    """The input, the weight and the options."""
    torch.manual_seed(0)
    size, kernel, how = CASES[name]
    return torch.randn(size), torch.randn(kernel), how


@pytest.mark.parametrize("name", CASES)
def test_slices_have_the_bits_of_the_whole_in_a_small_part_of_its_memory(name: str) -> None:
    values, weight, how = drawn(name)
    gradient = torch.randn_like(aten.convolution(values, weight, None, *how))
    bias = torch.randn(weight.shape[0])
    assert can_take_slices(layout_of(values), weight, how, run=True)
    backward = gradient, values, weight, list(bias.shape), *how
    both, one = [False, True, True], [True, False, False]
    calls: list[Any] = [
        lambda: aten.convolution(values, weight, bias, *how),
        lambda: convolution_in_slices(values, weight, bias, *how),
        lambda: aten.convolution_backward(*backward, both)[1:],
        lambda: convolution_backward_in_slices(*backward, both)[1:],
        lambda: aten.convolution_backward(*backward, one)[0],
        lambda: input_gradient(*layout_of(values), gradient, weight, *how),
    ]
    columns = weight[0].numel() * gradient[:, 0].nbytes
    assert columns == column_bytes(gradient, weight)
    for theirs, mine in zip(calls[::2], calls[1::2], strict=True):
        for own, other in zip(tree_leaves(mine()), tree_leaves(theirs()), strict=True):
            assert torch.equal(own, other)
            assert own.stride() == other.stride()
        assert peak_beyond_result(theirs, CPU) >= columns
        assert peak_beyond_result(mine, CPU) <= 2 * SLICE_BYTES + values.nbytes < columns


def test_a_large_weight_with_few_windows_is_not_copied() -> None:
    values, weight = torch.randn(1, 128, 3, 3, 3), torch.randn(128, 128, 3, 3, 3)
    backward = torch.randn_like(values), values, weight, None, *options(), [False, True, False]
    peak_bytes = peak_beyond_result(lambda: convolution_backward_in_slices(*backward)[1], CPU)
    assert peak_bytes < weight.nbytes / 2


def test_where_no_windows_are_written_out_there_are_no_slices() -> None:
    weight = torch.randn(16, 16, 3, 3, 3)
    padded = options(padding=3)  # there are windows without a value
    assert not can_take_slices(([1, 16, 8, 8, 8], [8192, 512, 64, 8, 1]), weight, padded, run=True)
    for values in (torch.randn(2, 16, 16, 16, 16), torch.randn(1, 16, 48, 48, 48)):
        assert not can_take_slices(layout_of(values), weight, options(), run=True)
        result = aten.convolution(values, weight, None, *options())
        assert torch.equal(convolution_in_slices(values, weight, None, *options()), result)


@pytest.mark.parametrize("name", ["convolution_in_slices", "input_gradient"])
def test_slices_with_other_bits_are_not_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, weight, how = drawn("plain")
    exact, whole = {}, getattr(convolutions, name)
    monkeypatch.setattr(convolutions, "_exact", exact)
    monkeypatch.setattr(convolutions, name, lambda *args: whole(*args).nextafter(torch.ones(())))
    assert can_take_slices(layout_of(values), weight, how, run=False)
    assert not can_take_slices(layout_of(values), weight, how, run=True)
    # other sizes likewise
    assert not can_take_slices(layout_of(values[:, :, :20]), weight, how, run=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("is_last", [False, True])
def test_an_inputs_gradient_does_without_the_input(
    num_dims: int, dtype: torch.dtype, is_last: bool
) -> None:
    values = torch.randn(2, 8, *[12] * num_dims, dtype=dtype)
    if is_last:
        values = values.transpose(1, -1).contiguous().transpose(1, -1)
    kernels = {(4, 8, *[3] * num_dims): False, (8, 4, *[2] * num_dims): True}
    for kernel, is_transposed in kernels.items():
        weight = torch.randn(kernel, dtype=dtype)
        how = options(stride=2, num_dims=num_dims)
        how[3] = is_transposed
        gradient = torch.randn_like(aten.convolution(values, weight, None, *how))
        mask = [True, False, False]
        theirs = aten.convolution_backward(gradient, values, weight, None, *how, mask)[0]
        mine = input_gradient(*layout_of(values), gradient, weight, *how)
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
