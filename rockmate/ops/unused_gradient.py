"""Gradients that are none: a graph has one for each of its values, and autograd has none for what a step has not used."""

from __future__ import annotations

import torch

from rockmate._torch.storage import version_of


def undefined_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Zeros that stand for no gradient at all: the step has not used what they are of."""
    gradient.unused_at = version_of(gradient)  # pyright: ignore[reportAttributeAccessIssue]
    return gradient


def is_undefined(gradient: torch.Tensor) -> bool:
    """Whether these are such zeros, to which nothing has been added since."""
    return getattr(gradient, "unused_at", None) == version_of(gradient)
