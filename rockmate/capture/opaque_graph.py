"""The autograd graph of one run of an opaque module, and how it is differentiated."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from rockmate._torch.storage import storage_id
from rockmate.errors import BackwardError
from rockmate.ops.undefined_gradient import undefined_gradient


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides, type and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """That of a tensor; one whose elements share memory, or leave gaps, is laid out anew."""
        like = torch.empty_like(tensor, device="meta")
        return cls(tuple(tensor.shape), like.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """A tensor of this layout, its values not set."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The tensor if it has this layout, and its memory to itself; else a copy that has."""
        has_gaps = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
        fits = tensor.stride() == self.stride and not has_gaps
        return tensor if fits else self.empty().copy_(tensor)


class RunGraph:
    """The autograd graph of one run, from its outputs to the inputs that require a gradient.

    Attributes:
        leaves: those inputs.
        ends: of the outputs, whose memory would be held with the tensors themselves.
    """

    def __init__(self, leaves: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.ends = [get_gradient_edge(each) if each.requires_grad else None for each in outputs]
        self.leaves = [leaf for leaf in leaves if leaf.requires_grad]
        for leaf in self.leaves:
            leaf.register_post_accumulate_grad_hook(_refuse)

    def found(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """What autograd gives for the inputs that require a gradient."""
        pairs = [
            (end, gradient)
            for end, gradient in zip(self.ends, gradients, strict=True)
            if not (end is None or gradient is None)
        ]
        ends, given = [end for end, _ in pairs], [gradient for _, gradient in pairs]
        if not (ends and self.leaves):
            return (None,) * len(self.leaves)
        return torch.autograd.grad(ends, self.leaves, given, allow_unused=True)

    def differentiate(
        self, gradients: Sequence[Tensor | None], layouts: Sequence[Layout | None]
    ) -> list[Tensor]:
        """Gradients of the inputs that require one, given those of the outputs."""
        values, seen = [], {storage_id(each) for each in gradients if each is not None}
        for gradient, layout in zip(self.found(gradients), filter(None, layouts), strict=True):
            # Each in memory of its own, as the plan counts it.
            made = layout.empty().zero_() if gradient is None else gradient
            value = layout.laid_out(made.clone() if storage_id(made) in seen else made)
            values.append(value if gradient is not None else undefined_gradient(value))
            seen.add(storage_id(made))
        return values


def _refuse(_: Tensor) -> None:
    """Raises where a backward other than that of the run has come to one of its inputs."""
    raise BackwardError(
        "a value within an untraced submodule reaches the loss by a hook or an attribute, so that "
        "what is before the submodule would miss its gradient. Return the value from the "
        'submodule, or keep the budget without a plan: mode="frames".'
    )


def attach_input(value: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf of the value's shape that takes the gradient, and the value as the graph's input."""
    leaf = _element(value.dtype, value.device).expand(value.shape).requires_grad_()
    with torch.enable_grad():
        return leaf, _Enter.apply(leaf, value)


@functools.cache
def _element(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor) -> Tensor:
        del leaf
        ctx.set_materialize_grads(False)  # zeros would give an input that is not used a gradient
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return gradient, None
