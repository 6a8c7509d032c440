"""Tensor subclasses that wrap other tensors, taken apart as AOTAutograd takes them apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (torch.Tensor, nn.Parameter)


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor has no numbers of its own but wraps tensors, and can be taken apart.

    The check for `__tensor_flatten__` has no public name.
    """
    return type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor)


def parts_of(tensor: Any) -> tuple[dict[str, Any], Any]:
    """The parts of a wrapper by attribute, tensors and others, and what else describes it."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that hold a tensor's numbers: itself, unless it is a wrapper."""
    if not is_wrapper(tensor):
        yield tensor
        return
    for part in parts_of(tensor)[0].values():
        if isinstance(part, torch.Tensor):
            yield from inner_tensors(part)


def inner_tensor(tensor: torch.Tensor, path: Sequence[str]) -> torch.Tensor:
    """The tensor at the end of a path of attributes."""
    found: Any = tensor
    for name in path:
        found = getattr(found, name)
    return found
