"""Layouts that kernels give results, where PyTorch's fake tensors are laid out otherwise.

Autograd goes by layouts: it copies a gradient only if a kernel cannot read it as it lies. A trace
on wrong fake layouts lacks such a copy, and the kernel then reads other numbers. Layouts are known
from runs of kernels (`observed_layouts`), but for memory behind a result that a run does not tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rockmate.ops.observed_layouts import in_observed_layout

_aten = torch.ops.aten

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The format with the channels last, by the number of dimensions."""

# Calls that clone the whole memory behind their first argument. PyTorch caches the fake results of
# such calls, and what it takes from the cache lies elsewhere.
CLONES = {
    _aten.copy.default,
    _aten.diagonal_scatter.default,
    _aten.select_scatter.default,
    _aten.slice_scatter.default,
}


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def in_kernel_layout(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """The fake result of a call in the layout that the kernel gives it, as far as that is known.

    Another result is made in the fake mode that is on.
    """
    observed = in_observed_layout(target, args, kwargs, result)
    if observed is not None:
        return observed
    return cloned(args[0], result) if target in CLONES else result


def cloned(given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """A result that lies in a copy of the whole memory of an argument, as the argument does."""
    nbytes, offset = given.untyped_storage().nbytes(), given.storage_offset()
    is_alike = result.untyped_storage().nbytes() == nbytes and result.storage_offset() == offset
    if is_alike or result.stride() != given.stride():  # one that overlaps itself is made dense
        return result
    numel = nbytes // given.element_size()
    memory = torch.empty(numel, dtype=result.dtype, device=result.device)
    return memory.as_strided(result.shape, result.stride(), offset)
