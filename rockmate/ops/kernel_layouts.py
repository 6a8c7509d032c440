"""Layouts that kernels give results, where PyTorch's fake tensors are laid out otherwise.

Autograd goes by layouts: it copies a gradient only if a kernel cannot read it as it lies. A trace
on wrong fake layouts lacks such a copy, and the kernel then reads other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rockmate._torch.ops import is_op, schema_of

_aten = torch.ops.aten

# Calls whose result the kernel lays out like the argument at a position, and PyTorch's fake one
# like another, where one of them is in a channels-last format and the other is not.
_LIKE_ARGUMENT: dict[Any, int] = {
    _aten.elu_backward.default: 0,
    _aten.hardsigmoid_backward.default: 0,
    _aten.hardswish_backward.default: 0,
    _aten.hardtanh_backward.default: 0,
    _aten.native_batch_norm_backward.default: 1,
    _aten.native_group_norm_backward.default: 1,
    _aten.softplus_backward.default: 0,
}

# Calls whose kernel makes a contiguous result, whatever it reads.
_CONTIGUOUS = {
    _aten._log_softmax.default,
    _aten._log_softmax_backward_data.default,
    _aten._softmax.default,
    _aten._softmax_backward_data.default,
}

# Calls that PyTorch computes in several steps on fake tensors, each with a call of one step on the
# same tensors.
_LIKE_CALL: dict[Any, Any] = {_aten.copysign.Tensor: _aten.mul.Tensor}

_PLAIN = torch.contiguous_format
_HALVES = (torch.bfloat16, torch.float16)


def in_kernel_layout(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """The fake result of a call in the layout that the kernel gives it.

    The layouts of norms are known for a CPU alone. Where the result is laid out otherwise, it is
    made in the fake mode that is on.

    Args:
        target: the function that was called.
        args: its arguments, fake tensors among them.
        kwargs: its keywords.
        result: what it returned.
    """
    position = _LIKE_ARGUMENT.get(target)
    if position is not None:
        return _like_argument(args[position], result, is_norm=position > 0)
    if target in _CONTIGUOUS:
        # That tensors are contiguous is known of symbolic ones, too, without fixing them.
        return result if result.is_contiguous() else torch.empty_like(result, memory_format=_PLAIN)
    if not _has_one_layout(target, result):
        return result
    operands = [each for each in args if isinstance(each, torch.Tensor) and each.ndim]
    if len(operands) < 2 or not (target in _LIKE_CALL or _are_halves(operands)):
        return result
    if all(_steps(each) == _steps(result) for each in operands):
        return result
    # A fake result of halves is computed on copies in 32 bits, which have layouts of their own.
    precise = [_in_32_bits(each) for each in args]
    again = _LIKE_CALL.get(target, target)(*precise, **kwargs)
    if _steps(again) == _steps(result):
        return result
    return torch.empty_strided(
        result.shape, again.stride(), dtype=result.dtype, device=result.device
    )


def _memory_format(tensor: torch.Tensor) -> torch.memory_format | None:
    """The format of a dense tensor; None if it is in none."""
    formats = [torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(tensor.ndim, [])
    return next((each for each in formats if tensor.is_contiguous(memory_format=each)), None)


def _like_argument(argument: torch.Tensor, result: Any, *, is_norm: bool) -> Any:
    if is_norm and argument.device.type != "cpu":
        return result
    laid_out, *others = (result,) if isinstance(result, torch.Tensor) else result
    if laid_out is not None and _steps(laid_out) != _steps(argument):
        own = _memory_format(argument) or torch.preserve_format
        laid_out = torch.empty_like(laid_out, memory_format=own)
    return laid_out if isinstance(result, torch.Tensor) else (laid_out, *others)


def _has_one_layout(target: Any, result: Any) -> bool:
    """Whether a call makes one new tensor, element by element."""
    return (
        isinstance(result, torch.Tensor)
        and is_op(target)
        and torch.Tag.pointwise in target.tags
        and not schema_of(target).is_mutable
    )


def _are_halves(operands: list[torch.Tensor]) -> bool:
    dtypes = {each.dtype for each in operands}
    return len(dtypes) == 1 and dtypes <= {*_HALVES}


def _in_32_bits(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor) or argument.dtype not in _HALVES:
        return argument
    return torch.empty_strided(
        argument.shape, argument.stride(), dtype=torch.float32, device=argument.device
    )


def _steps(tensor: torch.Tensor) -> str:
    """The strides as text, since to compare symbols would fix them."""
    return str(tuple(tensor.stride()))
