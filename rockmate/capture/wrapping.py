"""Wrapping the tensor that a graph returns for a gradient as eager wraps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rockmate._torch.subclasses import wrapped_parts
from rockmate.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, eq=False)
class Wrapping:
    """How to make a wrapper around one tensor.

    The gradient of a `DTensor` is one, with placements of its own.

    Attributes:
        kind: class of the wrapper.
        part: attribute of the tensor inside.
        others: its parts that are no tensors, by attribute: a device mesh.
        context: what else the class makes it from.
        shape: of the wrapper.
        strides: of the wrapper.
        is_padded: whether the tensor has padding beyond this rank's part of a parameter.
    """

    kind: Any
    part: str
    others: Mapping[str, Any]
    context: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_padded: bool = False

    @classmethod
    def like(cls, wrapper: torch.Tensor, *, what: str, is_padded: bool = False) -> Wrapping:
        """How to make another one like `wrapper`.

        Args:
            wrapper: its tensors may be fake.
            what: how an error calls it.
            is_padded: see the class.

        Raises:
            UnsupportedModelError: it wraps several tensors, or another wrapper.
        """
        parts, context = wrapped_parts(wrapper)
        tensors = [name for name, part in parts.items() if isinstance(part, torch.Tensor)]
        if len(tensors) != 1 or type(parts[tensors[0]]).__name__ != "FakeTensor":
            raise UnsupportedModelError(
                f"{what} is a {type(wrapper).__name__}, which wraps {len(tensors)} tensors or "
                "another wrapper, and a plan can wrap one plain tensor. Freeze the parameter, or "
                "detach the input."
            )
        others = {name: part for name, part in parts.items() if name != tensors[0]}
        # The trace has a stand-in for an object that is no tensor.
        real = {name: getattr(part, "real_obj", part) for name, part in others.items()}
        shape, strides = tuple(wrapper.shape), tuple(wrapper.stride())
        return cls(type(wrapper), tensors[0], real, context, shape, strides, is_padded)

    def wrap(self, tensor: torch.Tensor, parameter: Any = None) -> torch.Tensor:
        """The wrapper around a tensor.

        Args:
            tensor: what it wraps.
            parameter: whose gradient it is, if it is a parameter's.
        """
        if self.is_padded:
            tensor = tensor[: parameter.detach().to_local().shape[0]]
        parts = {self.part: tensor, **self.others}
        return self.kind.__tensor_unflatten__(parts, self.context, self.shape, self.strides)


NO_WRAPPINGS: Mapping[str, Wrapping] = {}
"""Of a step whose gradients are all plain."""
