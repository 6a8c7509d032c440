"""Synthetic inputs of the ops that are measured: constants that suit any op.

To fill a large input may take longer than the op itself, and a large vocabulary makes many of them.
So inputs from `_LEAST_POOLED_BYTES` on are kept from call to call on a CPU. They are as large as
its last cache, or larger: one that was just filled is hardly nearer than one of the call before.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from rockmate._torch.allocator import free_bytes
from rockmate.ops.rng import is_seed

_LEAST_POOLED_BYTES = 1 << 25
# The pool holds no more. Where less than that is free, it keeps nothing.
_MOST_POOLED_BYTES = 1 << 30

Layout = tuple[torch.dtype, int]
"""Type of the elements of a memory, and their number."""


class InputPool:
    """Large constant inputs, kept from call to call; each call gets a memory once."""

    def __init__(self) -> None:
        self._kept: dict[Layout, list[torch.Tensor]] = {}
        self._kept_bytes = 0

    def memory(self, fake: torch.Tensor, taken: dict[Layout, int]) -> torch.Tensor:
        """A constant memory for a tensor like a fake one.

        Args:
            fake: the tensor.
            taken: how many memories of each layout the call has taken; counts this one.
        """
        layout = (fake.dtype, _num_elements(fake))
        num_bytes = layout[1] * fake.dtype.itemsize
        if num_bytes < _LEAST_POOLED_BYTES:
            return _constant(fake)
        index = taken.get(layout, 0)
        taken[layout] = index + 1
        kept = self._kept.setdefault(layout, [])
        if index < len(kept):
            return kept[index]
        made = _constant(fake)
        free = free_bytes(fake.device)
        has_room = free is None or free >= _MOST_POOLED_BYTES
        if has_room and self._kept_bytes + num_bytes <= _MOST_POOLED_BYTES:
            kept.append(made)
            self._kept_bytes += num_bytes
        return made


def synthetic_value(
    node: fx.Node,
    *,
    runs_producer: bool = False,
    pool: InputPool | None = None,
    taken: dict[Layout, int] | None = None,
    integer: int = 0,
) -> torch.Tensor:
    """A synthetic input of an op.

    Attention with dropout returns its seed and offset, which the kernel of the backward may read on
    the host. Where they are then is known from a run of the forward alone.

    Args:
        node: the input.
        runs_producer: whether integers come from a run of the op that returns them, if it returns
            several tensors.
        pool: where a large input comes from; None to make it.
        taken: as for `InputPool.memory`.
        integer: what integers are; another one than 0 needs `pool` to be None.
    """
    fake = node.meta["val"]
    is_item = node.op == "call_function" and node.target is operator.getitem
    if not is_item or fake.is_floating_point():
        return synthetic_tensor(fake, pool, taken, integer)
    producer, index = node.args
    assert isinstance(producer, fx.Node)
    if not (runs_producer or is_seed(node)):
        return synthetic_tensor(fake, pool, taken, integer)
    args, kwargs = fx.map_arg((producer.args, producer.kwargs), synthetic_value)
    return producer.target(*args, **kwargs)[index]  # pyright: ignore[reportCallIssue]


def synthetic_tensor(
    fake: torch.Tensor,
    pool: InputPool | None = None,
    taken: dict[Layout, int] | None = None,
    integer: int = 0,
) -> torch.Tensor:
    """A constant tensor with the layout of a fake one; arguments as for `synthetic_value`."""
    if pool is None or taken is None or fake.device.type != "cpu":
        memory = _constant(fake, integer)
    else:
        memory = pool.memory(fake, taken)
    return memory.as_strided(fake.shape, fake.stride())


def _constant(fake: torch.Tensor, integer: int = 0) -> torch.Tensor:
    """A memory for a tensor like a fake one: 0.5 everywhere, or an integer."""
    value = 0.5 if fake.is_floating_point() or fake.is_complex() else integer
    return torch.full((_num_elements(fake),), value, dtype=fake.dtype, device=fake.device)


def _num_elements(fake: torch.Tensor) -> int:
    """The number of elements from the first of a tensor to its last in memory."""
    if not fake.numel():
        return 0
    dimensions = zip(fake.shape, fake.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in dimensions)
