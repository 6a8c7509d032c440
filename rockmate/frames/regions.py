"""Calls within a frame whose ops are observed, so that some ops are noted.

To see an op takes time, whether or not it is noted. So only those calls of submodules are observed
that hold the ops which are to be noted, and the whole frame if one of these is in no such call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class PartKey(NamedTuple):
    """Which call of which submodule a part is, within its frame."""

    path: str
    number: int


class Region(NamedTuple):
    """The ops of a submodule's call: positions from `begin` to before `end`."""

    key: PartKey
    begin: int
    end: int

    @property
    def num_ops(self) -> int:
        """How many there are."""
        return self.end - self.begin


class Regions:
    """The regions of a frame, of which any two lie apart or one within the other."""

    def __init__(self, regions: Iterable[Region], num_ops: int) -> None:
        self._innermost: list[Region | None] = [None] * num_ops
        for region in sorted(regions, key=lambda each: (each.begin, -each.end)):
            self._innermost[region.begin : region.end] = [region] * region.num_ops

    def around(self, ops: Iterable[int]) -> Sequence[Region] | None:
        """The smallest regions that hold some ops; None if there is one in no region.

        Args:
            ops: their positions.
        """
        found: set[Region] = set()
        for at in ops:
            region = self._innermost[at]
            if region is None:
                return None
            found.add(region)
        chosen: list[Region] = []
        for region in sorted(found, key=lambda each: (each.begin, -each.end)):
            if not chosen or region.begin >= chosen[-1].end:
                chosen.append(region)
        return chosen
