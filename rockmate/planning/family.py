"""Schedules in order of growing solver budget, of which a grid is evaluated at once and more when a budget asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rockmate.planning.candidate import Candidate, subsample
from rockmate.schedule.schedule import Schedule

_GRID_POINTS = 12
_TIGHTEST_POINTS = (
    4  # at the tight end, where simulated peaks do not follow the solver's budget closely
)
_BEYOND = 1  # members tried above the largest that fits

ScheduleMaker = Callable[[], Schedule]


class Family:
    """What one solver proposes, from its smallest budget to its largest."""

    def __init__(
        self, makers: Sequence[ScheduleMaker], evaluate: Callable[[Schedule], Candidate]
    ) -> None:
        """Nothing is made yet.

        Args:
            makers: of the schedules, in order.
            evaluate: simulates one.
        """
        self._makers = makers
        self._evaluate = evaluate
        self._made: dict[int, Candidate] = {}
        self._grid = sorted(
            {*subsample(len(makers), _GRID_POINTS), *range(min(_TIGHTEST_POINTS, len(makers)))}
        )

    def __getitem__(self, index: int) -> Candidate:
        if index not in self._made:
            self._made[index] = self._evaluate(self._makers[index]())
        return self._made[index]

    def grid(self) -> list[Candidate]:
        """The members that every budget may choose among."""
        return [self[index] for index in self._grid]

    def near_budget(self, budget_bytes: int) -> list[Candidate]:
        """Members between the last of the grid that fits and the next: simulated peaks nearly grow with the solver's budget."""
        fits = [
            place
            for place, index in enumerate(self._grid)
            if self[index].peak_bytes <= budget_bytes
        ]
        if not fits or fits[-1] + 1 == len(self._grid):
            return []
        low, high = self._grid[fits[-1]], self._grid[fits[-1] + 1]
        visited = []
        while high - low > 1:
            middle = (low + high) // 2
            visited.append(self[middle])
            if visited[-1].peak_bytes <= budget_bytes:
                low = middle
            else:
                high = middle
        return [
            *visited,
            *(self[index] for index in range(low + 1, min(low + 1 + _BEYOND, len(self._makers)))),
        ]
