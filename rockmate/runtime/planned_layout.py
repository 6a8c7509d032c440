"""Layouts on which an emitted program relies."""

from __future__ import annotations

import contextlib

import torch
from torch import fx

_aten = torch.ops.aten
_TRANSPOSES = {_aten.t.default, _aten.transpose.int, _aten.permute.default}
_READERS = {_aten.mm.default, _aten.sum.dim_IntList}
"""Their results lie alike for all strides of what they read, by which they round."""


class PlannedLayout:
    """The strides that a graph was captured with, on which its views rely."""

    def __init__(self, planned: torch.Tensor, *, is_needed: bool = True) -> None:
        """Takes the layout of a fake tensor.

        Args:
            planned: the tensor.
            is_needed: whether a reader relies on it.
        """
        self._shape, self._strides = tuple(planned.shape), tuple(planned.stride())
        self._is_needed = is_needed
        # The stride of a dimension of size 1 does not matter.
        self._dims = [dim for dim, size in enumerate(self._shape) if size > 1]

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this layout."""
        strides = tensor.stride()
        return strides == self._strides or all(
            strides[dim] == self._strides[dim] for dim in self._dims
        )

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor if it has this layout or needs none, else a copy that has."""
        if self.is_of(tensor):
            return tensor
        if not self._is_needed:
            with contextlib.suppress(RuntimeError):  # where eager copies, too
                tensor.view(-1, tensor.shape[-1])
                return tensor
        return torch.empty_strided(
            self._shape, self._strides, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)


def needs_its_layout(tangent: fx.Node) -> bool:
    """Whether a reader of a tangent relies on its strides.

    Matrix products and sums over it do not, nor over it as one matrix of rows.
    """
    return not all(_takes_any(user) for user in tangent.users)


def _takes_any(reader: fx.Node) -> bool:
    if reader.target is _aten.view.default:
        own, before = (each.meta["val"].shape for each in (reader, *reader.all_input_nodes[:1]))
        is_rows = len(own) == 2 and str(own[-1]) == str(before[-1])
        return is_rows and all(_takes_any(user) for user in reader.users)
    is_transpose = reader.target in _TRANSPOSES
    return reader.target in _READERS or (is_transpose and all(map(_takes_any, reader.users)))
