"""A ladder's rungs do not depend on what is asked for, and each is made once."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest

from rockmate.planning.candidate import Candidate
from rockmate.planning.tightening import TighteningPath
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import Simulation

TOP_BYTES = 1000


def candidate(peak_bytes: int, forward: tuple[int, ...] = ()) -> Candidate:
    """A schedule that tells by its runs what it came from."""
    simulation = Simulation(
        peak_bytes=peak_bytes, peak_position=0, time_ms=1.0, live_bytes=(), saved_bytes=0
    )
    return Candidate(schedule=Schedule(forward, ()), simulation=simulation)


class Improvement:
    """Stands for improvement.

    Writes the budget down behind those that the schedule has been brought down to, as far as
    `least_bytes`.
    """

    def __init__(self, least_bytes: int) -> None:
        self.least_bytes = least_bytes
        self.budgets: list[int] = []

    def __call__(self, above: Candidate, budget_bytes: int) -> Candidate | None:
        self.budgets.append(budget_bytes)
        return (
            None
            if budget_bytes < self.least_bytes
            else candidate(budget_bytes, (*above.schedule.forward, budget_bytes))
        )


def rungs(
    budgets: Sequence[int], *, factor: float = 2.0, least_bytes: int = 1
) -> tuple[list[tuple[int, ...] | None], list[int]]:
    """What each rung came from, None where there is none, and the budgets for which something was
    improved."""
    improvement = Improvement(least_bytes)
    ladder = TighteningPath(candidate(TOP_BYTES), factor, improvement)
    found = [ladder.smallest_above(budget_bytes) for budget_bytes in budgets]
    return [rung and rung.schedule.forward for rung in found], improvement.budgets


@pytest.mark.parametrize(
    ("budget_bytes", "expected"),
    [
        (1000, ()),
        (999, ()),
        (501, ()),
        (500, (500,)),
        (499, (500,)),
        (251, (500,)),
        (250, (500, 250)),
        (120, (500, 250, 125)),
    ],
)
def test_the_rung_is_the_last_that_is_not_below_the_budget(
    budget_bytes: int, expected: tuple[int, ...]
) -> None:
    assert rungs([budget_bytes]) == ([expected], list(expected))


def test_what_was_asked_before_changes_nothing_and_is_not_made_again() -> None:
    budgets = [300, 120, 900, 500, 130, 120]
    found, improved = rungs(budgets)
    assert found == [rungs([budget_bytes])[0][0] for budget_bytes in budgets]
    assert improved == [500, 250, 125]


@pytest.mark.parametrize("budget_bytes", [0, TOP_BYTES + 1])
def test_a_budget_that_no_rung_can_be_above_is_refused(budget_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"the budget is {budget_bytes:,} bytes; .* 1,000 bytes"):
        rungs([budget_bytes])


def test_below_what_cannot_be_brought_down_there_is_nothing() -> None:
    found, improved = rungs([600, 400, 200, 100, 400], least_bytes=300)
    assert found == [(), (500,), None, None, (500,)]
    assert improved == [500, 250]


def test_an_infinite_factor_leaves_the_top_alone() -> None:
    assert rungs([900, 1], factor=inf) == ([(), ()], [])
