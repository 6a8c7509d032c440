"""Which dimensions of a call share one size, and what no symbol stands for."""

from __future__ import annotations

from dataclasses import dataclass

from rockmate.capture.signature import CallSignature

MIN_SYMBOLIC_SIZE = 2  # that a symbol stands for


class SizesNotCoveredError(Exception):
    """A symbolic capture says nothing of a call's sizes; the text says why."""


@dataclass(frozen=True, slots=True)
class SizeGroups:
    """Which dimensions of a call's tensors have one size together.

    Attributes:
        places: of each group the (tensor, dimension) pairs that share its size.
    """

    places: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, call: CallSignature) -> SizeGroups:
        """The dimensions that have one size in `call`."""
        everything = tuple(
            (tensor, dim)
            for tensor, signature in enumerate(call.tensors)
            for dim in range(len(signature.shape))
        )
        return cls((everything,)).refined(call)

    def refined(self, call: CallSignature) -> SizeGroups:
        """These groups, each split into those of one size in `call`."""
        parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for index, group in enumerate(self.places):
            for tensor, dim in group:
                parts.setdefault((index, call.tensors[tensor].shape[dim]), []).append((tensor, dim))
        return SizeGroups(tuple(map(tuple, parts.values())))

    def sizes(self, call: CallSignature) -> tuple[int, ...]:
        """The size of each group in `call`, which `refined` does not split."""
        return tuple(call.tensors[group[0][0]].shape[group[0][1]] for group in self.places)

    def check_symbolic(self, first: CallSignature, call: CallSignature) -> None:
        """Raises `SizesNotCoveredError` if calls differ in a size that no symbol can stand for."""
        for known, size in zip(self.sizes(first), self.sizes(call), strict=True):
            if known != size and min(known, size) < MIN_SYMBOLIC_SIZE:
                raise SizesNotCoveredError(
                    f"sizes {known} and {size} make different graphs, as one of them broadcasts or "
                    "is empty"
                )
