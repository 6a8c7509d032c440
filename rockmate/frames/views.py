"""How a plain tensor lies in its storage."""

from __future__ import annotations

import torch


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides, 1 for dimensions of one element, where they do not matter."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple([stride if size > 1 else 1 for size, stride in pairs])
