"""Synthetic inputs of the ops that are measured: constants that suit any op.

To fill a large input may take longer than the op itself, and a large vocabulary makes many of them.
So inputs from `_LEAST_POOLED_BYTES` on are kept from call to call on a CPU. They are as large as
its last cache, or larger: one that was just filled is hardly nearer than one of the call before.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable

import torch
from torch import fx

from rockmate._torch.allocator import free_bytes
from rockmate.ops.rng import is_seed

_LEAST_POOLED_BYTES = 1 << 25
# The pool holds no more. Where less than that is free, it keeps nothing.
_MOST_POOLED_BYTES = 1 << 30

Fill = Callable[[torch.Tensor], torch.Tensor]
"""Makes a constant memory for a tensor like a fake one."""


def constant(fake: torch.Tensor, integer: int = 0) -> torch.Tensor:
    """A memory for a tensor like a fake one: 0.5 everywhere, or an integer."""
    value = 0.5 if fake.is_floating_point() or fake.is_complex() else integer
    return torch.full((_num_elements(fake),), value, dtype=fake.dtype, device=fake.device)


class InputPool:
    """Large constant inputs on a CPU, kept from call to call."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self._kept_bytes = 0

    def for_call(self) -> Fill:
        """The memories of one call, which gets each of them once."""
        num_taken = Counter[tuple[torch.dtype, int]]()

        def memory(fake: torch.Tensor) -> torch.Tensor:
            kind = fake.dtype, _num_elements(fake)
            num_bytes = kind[1] * fake.dtype.itemsize
            if num_bytes < _LEAST_POOLED_BYTES or fake.device.type != "cpu":
                return constant(fake)
            kept, index = self._kept.setdefault(kind, []), num_taken[kind]
            num_taken[kind] += 1
            if index < len(kept):
                return kept[index]
            made, free = constant(fake), free_bytes(fake.device)
            has_room = free is None or free >= _MOST_POOLED_BYTES
            if has_room and self._kept_bytes + num_bytes <= _MOST_POOLED_BYTES:
                kept.append(made)
                self._kept_bytes += num_bytes
            return made

        return memory


def synthetic_value(
    node: fx.Node, fill: Fill = constant, *, runs_producer: bool = False
) -> torch.Tensor:
    """A synthetic input of an op.

    Attention with dropout returns its seed and offset, which the kernel of the backward may read on
    the host. Where they are then is known from a run of the forward alone. With `runs_producer`,
    all integers of an op that returns several tensors come from a run of it.
    """
    fake = node.meta["val"]
    is_item = node.op == "call_function" and node.target is operator.getitem
    if not is_item or fake.is_floating_point() or not (runs_producer or is_seed(node)):
        return synthetic_tensor(fake, fill)
    producer, index = node.args
    assert isinstance(producer, fx.Node)
    args, kwargs = fx.map_arg((producer.args, producer.kwargs), synthetic_value)
    return producer.target(*args, **kwargs)[index]  # pyright: ignore[reportCallIssue]


def synthetic_tensor(fake: torch.Tensor, fill: Fill = constant) -> torch.Tensor:
    """A constant tensor with the layout of a fake one; `fill` makes its memory."""
    return fill(fake).as_strided(fake.shape, fake.stride())


def _num_elements(fake: torch.Tensor) -> int:
    """The number of elements from the first of a tensor to its last in memory."""
    if not fake.numel():
        return 0
    dimensions = zip(fake.shape, fake.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in dimensions)
