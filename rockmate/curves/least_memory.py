"""Sessions of one model at many sizes, and the largest size whose smallest peak fits.

The smallest peak of a step grows nearly as a polynomial with its size. So the search proposes sizes
by interpolation between known ones, and ends when neighbours disagree: a few sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rockmate.entry.planner import Planner
from rockmate.graph.chunking.chunks import Chunks
from rockmate.graph.chunking.region import Refusal
from rockmate.planning.chunkable_blocks import ChunkableBlocks
from rockmate.planning.step import CapturedStep

_MAX_INTERPOLATIONS = 8  # then the interval is halved
_MAX_GROWTH = 8  # from the largest known number to the next

PlannerOf = Callable[[CapturedStep], Planner]


class SizedPlanners:
    """Planners at any size: of the step as captured, and of the step in chunks."""

    def __init__(self, step_of: Callable[[int], CapturedStep], planner_of: PlannerOf) -> None:
        self._step_of = step_of
        self._planner_of = planner_of
        self._steps: dict[int, CapturedStep] = {}
        self._planners: dict[tuple[int, Chunks | None], Planner | None] = {}

    def step(self, size: int) -> CapturedStep:
        """The step as captured."""
        if size not in self._steps:
            self._steps[size] = self._step_of(size)
        return self._steps[size]

    def planner(self, size: int, chunks: Chunks | None = None) -> Planner | None:
        """The planner at a size; None if the step cannot run in these chunks."""
        key = size, chunks
        if key not in self._planners:
            step = self.step(size)
            made = step if chunks is None else step.in_chunks(chunks)
            self._planners[key] = None if isinstance(made, Refusal) else self._planner_of(made)
        return self._planners[key]

    def whole(self, size: int) -> Planner:
        """The planner of the step as captured."""
        planner = self.planner(size)
        assert planner is not None
        return planner

    def smallest_chunks(self, size: int) -> Chunks | None:
        """Of each form the most chunks: those of the smallest peak at a size.

        None if no chunks have a smaller peak than the step as captured.
        """
        whole = self.whole(size)
        blocks = ChunkableBlocks(self.step(size), whole.baseline_peak_bytes, numerics="any_order")
        best, least_bytes = None, whole.minimum_peak_bytes
        for chunks in (form[-1] for form in blocks.chunkings):
            planner = self.planner(size, chunks)
            if planner is not None and planner.minimum_peak_bytes < least_bytes:
                best, least_bytes = chunks, planner.minimum_peak_bytes
        return best


def largest_within(
    need: Callable[[int], int], limit_bytes: int, *, most: int, known: Iterable[int], low: int = 0
) -> int:
    """The largest whole number up to `most` whose need is within a limit; 0 if that of 1 is not.

    Needs grow with the number. The search begins with the `known` numbers, above `low`, which is
    known to fit, or 0.
    """
    needs: dict[int, int] = {}
    proposals = sorted(number for number in set(known) if low < number <= most)
    high = most + 1
    while high - low > 1:
        if proposals:
            number = proposals.pop(0)
        elif not needs:
            number = low + 1
        elif len(needs) < _MAX_INTERPOLATIONS or high > most:
            number = min(_interpolated(needs, limit_bytes), max(needs) * _MAX_GROWTH)
        else:
            number = (low + high) // 2
        number = min(max(number, low + 1), high - 1)
        needs[number] = need(number)
        if needs[number] <= limit_bytes:
            low = number
        else:
            high = number
    return low


def _interpolated(needs: dict[int, int], limit_bytes: int) -> int:
    """Where the line through the two numbers nearest to the limit reaches it.

    Twice the only number that is known, or half of it.
    """
    if len(needs) < 2:
        ((number, num_bytes),) = needs.items()
        return 2 * number if num_bytes <= limit_bytes else number // 2
    nearest = sorted(needs, key=lambda number: abs(needs[number] - limit_bytes))[:2]
    first, second = sorted(nearest)
    slope = (needs[second] - needs[first]) / (second - first)
    return 2 * second if slope <= 0 else int(first + (limit_bytes - needs[first]) / slope)
