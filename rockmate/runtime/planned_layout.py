"""Layouts on which an emitted program relies."""

from __future__ import annotations

import torch


class PlannedLayout:
    """The strides that a graph was captured with, on which its views rely."""

    def __init__(self, planned: torch.Tensor) -> None:
        """Takes the layout of a fake tensor."""
        self._shape, self._strides = tuple(planned.shape), tuple(planned.stride())
        # The stride of a dimension of size 1 does not matter.
        self._dims = [dim for dim, size in enumerate(self._shape) if size > 1]

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this layout."""
        strides = tensor.stride()
        return strides == self._strides or all(
            strides[dim] == self._strides[dim] for dim in self._dims
        )

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor if it has this layout, else a copy that has."""
        if self.is_of(tensor):
            return tensor
        return torch.empty_strided(
            self._shape, self._strides, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
