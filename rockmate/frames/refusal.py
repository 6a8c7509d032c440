"""What becomes of a budget below the smallest peak of frames: an error, or that peak."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rockmate.budget import OnInfeasible, size_text
from rockmate.errors import InfeasibleBudgetError
from rockmate.frames.knapsack import decidable_bytes
from rockmate.frames.memory import Memory
from rockmate.frames.needs import StepNeeds

logger = logging.getLogger(__name__)

_MOST_WAITS = 8
"""Steps, each of a kind of its own, that run at their smallest peak before the error."""


class Refusal:
    """Of the budget of one model.

    Steps of another kind than those so far may need more, and the error is to name a budget that
    all of them keep. So it waits for those that come next.

    Attributes:
        of_peak: the error of a real peak; None if none passed the budget.
    """

    def __init__(self, memory: Memory, on_infeasible: OnInfeasible) -> None:
        """The budget is not known to be too small; for the arguments, see `FrameRunner`."""
        self.of_peak: InfeasibleBudgetError | None = None
        self._of_minimum: InfeasibleBudgetError | None = None
        self._of_whole: InfeasibleBudgetError | None = None
        self._memory, self._is_error = memory, on_infeasible == "error"
        self._num_waits, self._told = 0, set[int]()

    def raise_if_due(self, *, is_known: bool) -> None:
        """Raises the error, if there is one.

        Args:
            is_known: whether a step as large as the one that begins was measured.

        Raises:
            InfeasibleBudgetError: so it is, or too many steps have run since.
        """
        error = self.of_peak or self._of_minimum
        if error is None:
            return
        is_other = not is_known or self._memory.in_flight.has_more
        if not is_other or self._num_waits == _MOST_WAITS:
            raise error
        self._num_waits += 1
        logger.warning("a step of another kind runs before an error: %s", error)

    def note_undropped(self, budget_bytes: int, needs: StepNeeds) -> None:
        """Takes what a step has needed that could not drop frames which are now left whole."""
        self._of_whole = self._error(budget_bytes, needs) if self._is_error else None

    def raise_if_held(self, num_bytes: int) -> None:
        """Raises an error if frames that are left whole hold more than the budget with the rest.

        What is named is the peak of that step: the smallest one, with frames within these, is known
        only when another step above the budget has run.
        """
        if self._of_whole is not None and num_bytes > self._of_whole.budget_bytes:
            raise self._of_whole

    def taken(
        self, budget_bytes: int, needs: StepNeeds, measured: Iterable[StepNeeds | None]
    ) -> int:
        """The budget, or the smallest peak of a step; of all that were measured in the error."""
        minimum = self._memory.minimum_bytes(needs)
        if self._is_error:
            several = [needs, *(each for each in measured if each is not None)]
            largest = max(several, key=self._memory.minimum_bytes)
            self._of_minimum = self._error(budget_bytes, largest)
        if self._is_error or budget_bytes >= minimum:
            return max(budget_bytes, minimum)
        if minimum not in self._told:
            self._told.add(minimum)
            text = "the budget of %s is below the smallest peak of frames, %s, which is taken"
            logger.warning(text, size_text(budget_bytes), size_text(minimum))
        return decidable_bytes(minimum, len(needs.by_key))

    def _error(self, budget_bytes: int, needs: StepNeeds) -> InfeasibleBudgetError | None:
        if budget_bytes >= self._memory.minimum_bytes(needs):
            return None
        minimum_bytes = self._memory.minimum_bytes(needs, counts_one=True)
        largest = max(needs.by_key, key=lambda key: needs.by_key[key].peak_bytes)
        where = f"{largest} in batches as large as those so far"
        return InfeasibleBudgetError(budget_bytes, minimum_bytes, where=where)
