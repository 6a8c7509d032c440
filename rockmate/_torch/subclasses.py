"""Tensor subclasses: those that wrap other tensors, and those that are a class and attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (torch.Tensor, nn.Parameter)


def is_subclassed(tensor: Any) -> bool:
    """Whether a tensor is of another class than a tensor's or parameter's."""
    return type(tensor) not in _PLAIN


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor has no numbers of its own but wraps tensors, and can be taken apart.

    AOTAutograd asks the same. The check for `__tensor_flatten__` has no public name.
    """
    return type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor)


def wrapped_parts(tensor: Any) -> tuple[dict[str, Any], Any]:
    """The parts of a wrapper by attribute, tensors and others, and what else describes it."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def at_path(tensor: torch.Tensor, path: Sequence[str]) -> torch.Tensor:
    """The tensor at the end of a path of attributes."""
    found: Any = tensor
    for name in path:
        found = getattr(found, name)
    return found


def without_class(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the memory of one that is no wrapper, as a plain tensor."""
    return tensor.as_subclass(torch.Tensor)  # pyright: ignore[reportArgumentType]
