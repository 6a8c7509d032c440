"""How a plain tensor lies in its storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class View(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> View:
        """Of a plain tensor."""
        offset = int(tensor.storage_offset())
        return View(tensor.dtype, tensor.shape, tensor.stride(), offset)

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that lies so in the storage of another one, of the same type."""
        return tensor.as_strided(self.shape, self.stride, self.offset)


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides, 1 for dimensions of one element, where they do not matter."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple([stride if size > 1 else 1 for size, stride in pairs])
