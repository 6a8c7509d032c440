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
