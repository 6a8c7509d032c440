"""The schedules that one solver proposes, ordered by its budget and evaluated on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rockmate.planning.candidate import Candidate, subsample_indices
from rockmate.schedule.schedule import Schedule

# Number of members at equal distances that every budget may choose from.
_GRID_POINTS = 12
# Number of members at the tight end that join the grid. There, the simulated peaks do not follow
# the solver's budgets closely.
_TIGHT_GRID_POINTS = 4
# Number of members that are tried above the largest one that fits.
_NUM_ABOVE = 1

ScheduleMaker = Callable[[], Schedule]


class Family:
    """The proposals of one solver, from its smallest budget to its largest.

    A member is made and simulated when it is first asked for.

    Args:
        makers: of the schedules, in order of growing solver budget.
        evaluate: simulates a schedule.
    """

    def __init__(
        self, makers: Sequence[ScheduleMaker], evaluate: Callable[[Schedule], Candidate]
    ) -> None:
        self._makers = makers
        self._evaluate = evaluate
        self._evaluated: dict[int, Candidate] = {}
        self._grid = sorted(
            {
                *subsample_indices(len(makers), _GRID_POINTS),
                *range(min(_TIGHT_GRID_POINTS, len(makers))),
            }
        )

    def __getitem__(self, index: int) -> Candidate:
        if index not in self._evaluated:
            self._evaluated[index] = self._evaluate(self._makers[index]())
        return self._evaluated[index]

    def grid(self) -> list[Candidate]:
        """The members that every budget may choose from."""
        return [self[index] for index in self._grid]

    def near_budget(self, budget_bytes: int) -> list[Candidate]:
        """Members between the last grid member that fits and the next one, found by bisection.

        Bisection assumes that the simulated peak grows with the solver's budget. This holds but for
        small deviations.
        """
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
        above = range(low + 1, min(low + 1 + _NUM_ABOVE, len(self._makers)))
        return [*visited, *(self[index] for index in above)]
