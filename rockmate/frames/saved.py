"""A tensor that a frame has saved."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rockmate._torch.storage import version_of
from rockmate.state.tensors import storages_of


class Saved(NamedTuple):
    """A saved tensor, its storages, and the number of in-place writes to it at that time."""

    tensor: torch.Tensor
    storages: tuple[int, ...]
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Saved:
        """A new tensor, without its history."""
        return Saved(tensor.detach(), storages_of(tensor), version_of(tensor))
