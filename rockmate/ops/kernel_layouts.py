"""Layouts that kernels give results, where PyTorch's fake tensors are laid out otherwise.

Autograd goes by layouts: it copies a gradient only if a kernel cannot read it as it lies. A trace
on wrong fake layouts lacks such a copy, and the kernel then reads other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rockmate._torch.dispatch import is_op, schema_of
from rockmate.ops.kernels import dropout_apply
from rockmate.ops.observed_layouts import in_observed_layout

_aten = torch.ops.aten

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The format with the channels last, by the number of dimensions."""

# Calls whose first result the kernel lays out in the memory format of the argument at a position,
# and contiguously where that is in none.
_IN_FORMAT_OF: dict[Any, int] = {
    _aten._native_batch_norm_legit.no_stats: 0,
    _aten._native_batch_norm_legit_functional.default: 0,
    _aten.max_unpool2d.default: 0,
    _aten.native_batch_norm.default: 0,
    _aten.native_batch_norm_backward.default: 1,
    _aten.native_group_norm.default: 0,
    _aten.native_group_norm_backward.default: 1,
    _aten.channel_shuffle.default: 0,
    _aten.native_channel_shuffle.default: 0,
    _aten.reflection_pad2d_backward.default: 1,
    _aten.reflection_pad3d.default: 0,
    _aten.reflection_pad3d_backward.default: 1,
    _aten.replication_pad2d_backward.default: 1,
    _aten.replication_pad3d.default: 0,
    _aten.replication_pad3d_backward.default: 1,
    _aten.roll.default: 0,
}

# Calls whose kernel makes contiguous results, whatever it reads.
_CONTIGUOUS = {
    _aten._log_softmax.default,
    _aten._log_softmax_backward_data.default,
    _aten._softmax.default,
    _aten._softmax_backward_data.default,
    _aten.glu_backward.default,
    _aten.huber_loss_backward.default,
    _aten.mse_loss_backward.default,
    _aten.native_layer_norm_backward.default,
    _aten.pow.Scalar,
    _aten.smooth_l1_loss_backward.default,
}

# Elementwise calls of one kernel, which lays its result out as it would a product of the arguments
# at these positions. On fake tensors PyTorch computes them in steps, or with other dtypes.
_LIKE_PRODUCT: dict[Any, tuple[int, int]] = {
    _aten.copysign.Tensor: (0, 1),
    _aten.div.Tensor_mode: (0, 1),
    _aten.elu_backward.default: (0, 5),
    _aten.hardsigmoid_backward.default: (0, 1),
    _aten.hardswish_backward.default: (0, 1),
    _aten.hardtanh_backward.default: (0, 1),
    _aten.leaky_relu_backward.default: (1, 0),
    _aten.log_sigmoid_backward.default: (0, 0),
    _aten.mish_backward.default: (0, 1),
    _aten.native_dropout_backward.default: (0, 1),
    _aten.rrelu_with_noise_backward.default: (2, 0),
    _aten.softplus_backward.default: (0, 1),
    _aten.special_xlog1py.default: (0, 1),
    _aten.xlogy.Tensor: (0, 1),
    dropout_apply: (0, 1),
}

# Calls that clone the whole memory behind their first argument. PyTorch caches the fake results of
# such calls, and what it takes from the cache lies elsewhere.
CLONES = {
    _aten.copy.default,
    _aten.diagonal_scatter.default,
    _aten.select_scatter.default,
    _aten.slice_scatter.default,
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

_LOG_SIGMOID = _aten.log_sigmoid_forward.default  # contiguous on a CPU only
_PLAIN = torch.contiguous_format
_HALVES = (torch.bfloat16, torch.float16)


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def in_kernel_layout(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """The fake result of a call in the layout that the kernel gives it.

    Memory formats are known of kernels on a CPU alone. Another result is made in the fake mode that
    is on.

    Args:
        target: the function that was called.
        args: its arguments, fake tensors among them.
        kwargs: its keywords.
        result: what it returned.
    """
    observed = in_observed_layout(target, args, kwargs, result)
    if observed is not None:
        return observed
    result = _with_statistics(target, args, result)
    position = _IN_FORMAT_OF.get(target)
    if position is not None and args[position].device.type == "cpu":
        return _first_in(_memory_format(args[position]) or _PLAIN, result)
    if target in _CONTIGUOUS or (target is _LOG_SIGMOID and args[0].device.type == "cpu"):
        return _all_in(_PLAIN, result)
    if not isinstance(result, torch.Tensor):
        return result
    if target in CLONES:
        return cloned(args[0], result)
    if target in _LIKE_PRODUCT:
        if torch.memory_format in map(type, args):
            return result
        operands = [args[position] for position in _LIKE_PRODUCT[target]]
    else:
        operands = [each for each in args if isinstance(each, torch.Tensor)]
        if not _makes_elements(target) or not _are_halves(operands):
            return result
    if all(_steps(each) == _steps(result) for each in operands if isinstance(each, torch.Tensor)):
        return result
    # A fake result of halves is computed on copies in 32 bits, which have layouts of their own.
    if target in _LIKE_PRODUCT:
        again = torch.mul(*map(_in_32_bits, operands))
    else:
        again = target(*map(_in_32_bits, args), **kwargs)
    return result if _steps(again) == _steps(result) else _laid_out_like(again, result)


def _with_statistics(target: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The results of a normalization, with statistics in the dtypes that CPU kernels give them.

    Of an input in half precision, kernels save statistics in the precision of the parameters or
    running statistics, and the latter keep their dtype. PyTorch's fake results have the input's
    dtype, and 32 bits, in their place.
    """
    if target is _aten.native_group_norm_backward.default and result[0] is not None:
        # The input's, whatever the statistics'.
        return (result[0].to(args[1].dtype), *result[1:])
    saved, running = _STATISTICS.get(target, ((), ()))
    if not saved:
        return result
    given, *others = [each for each in args if isinstance(each, torch.Tensor)]
    if given.device.type != "cpu" or given.dtype not in _HALVES:
        return result
    precise = next((each.dtype for each in others if each.dtype == torch.float32), given.dtype)
    dtypes = dict.fromkeys(saved, precise)
    for position, source in zip(running, args[3:5], strict=False):
        dtypes[position] = source.dtype
    return tuple(
        each.to(dtypes[position]) if position in dtypes else each
        for position, each in enumerate(result)
    )


def cloned(given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """A result that lies in a copy of the whole memory of an argument, as the argument does."""
    nbytes, offset = given.untyped_storage().nbytes(), given.storage_offset()
    is_alike = result.untyped_storage().nbytes() == nbytes and result.storage_offset() == offset
    if is_alike or result.stride() != given.stride():  # one that overlaps itself is made dense
        return result
    numel = nbytes // given.element_size()
    memory = torch.empty(numel, dtype=result.dtype, device=result.device)
    return memory.as_strided(result.shape, result.stride(), offset)


def _laid_out_like(other: Any, result: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        result.shape, other.stride(), dtype=result.dtype, device=result.device
    )


def _all_in(own: torch.memory_format, result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return _first_in(own, result)
    return tuple(each if each is None else _first_in(own, each) for each in result)


def _first_in(own: torch.memory_format, result: Any) -> Any:
    """A result whose first tensor, if there is one, is in a memory format.

    Whether tensors are in a format is known of symbolic ones, too, without fixing their sizes.
    """
    first, *others = (result,) if isinstance(result, torch.Tensor) else result
    if first is not None and not first.is_contiguous(memory_format=own):
        first = torch.empty_like(first, memory_format=own)
    return first if isinstance(result, torch.Tensor) else (first, *others)


def _memory_format(tensor: torch.Tensor) -> torch.memory_format | None:
    """The format of a dense tensor; None if it is in none."""
    formats = [torch.contiguous_format]
    formats += [CHANNELS_LAST[tensor.ndim]] if tensor.ndim in CHANNELS_LAST else []
    return next((each for each in formats if tensor.is_contiguous(memory_format=each)), None)


def _makes_elements(target: Any) -> bool:
    """Whether a call makes a new tensor element by element."""
    return is_op(target) and torch.Tag.pointwise in target.tags and not schema_of(target).is_mutable


def _are_halves(operands: list[torch.Tensor]) -> bool:
    dtypes = {each.dtype for each in operands if each.ndim}
    return len(operands) > 1 and len(dtypes) == 1 and dtypes <= {*_HALVES}


def _in_32_bits(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor) or argument.dtype == torch.float32:
        return argument
    return torch.empty_strided(
        argument.shape, argument.stride(), dtype=torch.float32, device=argument.device
    )


def _steps(tensor: torch.Tensor) -> str:
    """The strides as text, since to compare symbols would fix them."""
    return str(tuple(tensor.stride()))
