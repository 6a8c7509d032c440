"""A group of ops as one call: what a joint graph calls in place of the group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

# Takes a list of tensors, which it may empty, and returns all results.
Kernel = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlaceKernel:
    """A kernel that writes the group's first result into the memory of one argument.

    Attributes:
        position: of that argument.
        shape: of the result. The argument may have another, if both are contiguous.
        kernel: takes the arguments of the group; it returns all results but the first.
    """

    position: int
    shape: tuple[int, ...]
    kernel: Kernel

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Runs the group; the argument holds the first result afterwards."""
        target = tensors[self.position]
        rest = self.kernel([*tensors])
        if target.shape != self.shape:
            target = target.view(self.shape)
        return (target, *rest) if rest else target

    @property
    def __name__(self) -> str:
        """For emitted code."""
        return f"fused_onto_{self.position}"


class FusedOp:
    """A group of ops as one op, with equal numbers up to rounding.

    Attributes:
        key: equal for groups of the same ops on tensors of the same layouts, in every process.
        calls: names of the ops in the group.
        kernel: runs the group, and returns the largest result first; None for a group that is only
            planned for another machine.
        in_place: forms in the memory of an argument, by its position.
    """

    def __init__(self, key: str, kind: str, calls: tuple[str, ...]) -> None:
        """Without a kernel. Snapshots of steps at other sizes compare the kind."""
        self.key = key
        self.calls = calls
        self.kernel: Kernel | None = None
        self.in_place: Mapping[int, InPlaceKernel] = {}
        self.__name__ = f"fused_{key}"
        self.__qualname__ = f"fused_{kind}"

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Runs the group."""
        assert self.kernel is not None, f"{self.__name__} has no kernel on this machine"
        results = tuple(self.kernel([*tensors]))
        return results[0] if len(results) == 1 else results

    def __str__(self) -> str:
        return self.__name__
