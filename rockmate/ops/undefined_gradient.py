"""Marks gradients that autograd would leave undefined (None).

A captured graph has a gradient for each of its values. Autograd has none for a value that the step
has not used. The graph's gradient of such a value is a tensor of zeros that carries a mark.
"""

from __future__ import annotations

import torch

from rockmate._torch.storage import version_of


def undefined_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Marks zeros as an undefined gradient, in place, and returns them."""
    gradient.undefined_at = version_of(gradient)  # pyright: ignore[reportAttributeAccessIssue]
    return gradient


def is_undefined(gradient: torch.Tensor) -> bool:
    """Whether a gradient is marked as undefined and was not written since."""
    return getattr(gradient, "undefined_at", None) == version_of(gradient)
