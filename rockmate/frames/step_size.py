"""How large a step is, before it runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from rockmate._torch.allocator import Recording
from rockmate._torch.engine import is_profiling
from rockmate.frames.agreement import Agreement
from rockmate.state.opened_object import tensors_within

_MOST_DIMENSIONS = 6
_SMALL_SHARE = 1 / 64
"""A tensor with less than this share of all elements does not count by its shape."""


class StepSize(NamedTuple):
    """The size of a step; with sharded parameters the largest of all ranks.

    Attributes:
        num_elements: of the inputs.
        held_bytes: by frames of earlier steps.
        is_profiled: whether a profiler runs, so that nothing can be recorded.
        trained: stands for which parameters are trained, and in which precision.
        dimensions: of large inputs: of all with so many dimensions, the largest of each.
    """

    num_elements: int
    held_bytes: int
    is_profiled: bool
    trained: int
    dimensions: tuple[int, ...]

    @classmethod
    def of(
        cls, inputs: Any, held_bytes: int, trained: Hashable, agreement: Agreement | None
    ) -> StepSize:
        """The size of a step. Collective with an agreement.

        Args:
            inputs: nested containers and objects with tensors.
            held_bytes: see the attribute.
            trained: which parameters are, and in which precision.
            agreement: with the ranks that take the same decisions.
        """
        tensors = tensors_within(inputs)
        total = max(1, sum(each.numel() for each in tensors))
        sizes = [0] * sum(range(_MOST_DIMENSIONS + 1))
        for each in tensors:
            if each.numel() >= _SMALL_SHARE * total and each.dim() <= _MOST_DIMENSIONS:
                first = sum(range(each.dim()))
                for position, size in enumerate(each.shape, first):
                    if isinstance(size, int):  # a ragged dimension has no size
                        sizes[position] = max(sizes[position], size)
        # A recording that was left, another model's perhaps, gives way.
        is_profiled = is_profiling() and not Recording.is_under_way()
        own = total, held_bytes, int(is_profiled), hash(trained), *sizes
        num_elements, held_bytes, profiled, trained, *sizes = (
            own if agreement is None else agreement.largest(own)
        )
        return cls(num_elements, held_bytes, bool(profiled), trained, tuple(sizes))

    def covers(self, other: StepSize) -> bool:
        """Whether another step of the same parameters is no larger, in any dimension.

        A longer sequence takes more memory than as many elements in short ones, by attention.
        """
        is_alike = self.trained == other.trained and self.num_elements >= other.num_elements
        return is_alike and all(
            own >= size for own, size in zip(self.dimensions, other.dimensions, strict=True)
        )

    def smallest_covering(self, sizes: Iterable[StepSize]) -> StepSize | None:
        """The smallest of some that covers this one; None if none does."""
        found = [each for each in sizes if each.covers(self)]
        return min(found, key=lambda each: each.num_elements, default=None)
