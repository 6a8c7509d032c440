"""A tensor that a frame has saved."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Saved(NamedTuple):
    """A saved tensor, its storages, and the number of in-place writes to it at that time."""

    tensor: torch.Tensor
    storages: tuple[int, ...]
    version: int
