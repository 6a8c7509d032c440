"""Inputs that an autograd graph uses and does not hold.

Their memory can be released after the forward and supplied again before the backward.

A graph holds an input in two ways: as a leaf that a gradient is wanted of, and wherever an op has
saved it, or a view of it. Here the leaf is another tensor, of one element; and what is saved of a
borrowed input is noted by its place in it, to be looked up in the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rockmate._torch.engine import saving
from rockmate._torch.storage import storage_id

_Place = tuple[
    int, tuple[int, ...], tuple[int, ...], int
]  # position of the input, shape, strides, elements from its first


class ReleasableInputs:
    """What one graph borrows."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        positions: Iterable[int],
        *,
        note: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Nothing is saved yet.

        Args:
            inputs: of the graph.
            positions: of those that it borrows.
            note: called with each tensor that is saved, borrowed or not, if its memory tells all of
                it.
        """
        self._positions = tuple(positions)
        self._starts = {  # by memory: position, type, first element
            storage_id(inputs[position]): (
                position,
                inputs[position].dtype,
                inputs[position].storage_offset(),
            )
            for position in reversed(self._positions)
            if _is_plain(inputs[position])
        }
        self._note = note
        self._given: dict[int, Tensor] = {}

    def saving(self) -> AbstractContextManager[None]:
        """While the graph is made."""
        if self._note is None and not self._starts:
            return nullcontext()
        return saving(self._pack, self._unpack)

    @contextmanager
    def given(self, values: Sequence[Tensor]) -> Iterator[None]:
        """While the graph is differentiated.

        Args:
            values: the borrowed inputs, in the order of `positions`.
        """
        self._given.update(zip(self._positions, values, strict=True))
        try:
            yield
        finally:
            self._given.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _Place:
        if not _is_plain(tensor):
            return tensor.detach()
        if self._note is not None:
            self._note(tensor)
        start = self._starts.get(storage_id(tensor))
        if start is None or start[1] != tensor.dtype:
            return (
                tensor.detach()
            )  # with its own history the graph would hold itself, and never be released
        return (
            start[0],
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset() - start[2]),
        )

    def _unpack(self, saved: Tensor | _Place) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        position, shape, stride, offset = saved
        value = self._given[position]
        return value.as_strided(shape, stride, value.storage_offset() + offset)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is numbers in memory as they stand there.

    Not sparse, nor conjugated or negated when they are read.
    """
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


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
