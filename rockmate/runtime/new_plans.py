"""Counts the calls of one module for which something had to be planned anew."""

from __future__ import annotations

import logging

from rockmate.errors import FRAMES_ADVICE, UnsupportedModelError

logger = logging.getLogger(__name__)

FEW_VALUES = 4
"""Plans for values that may go on for ever: constants of calls, what the forward reads."""
FEW_FORMS = 16
"""Plans for what has few values, as a rule: keywords, sizes."""


class ManyPlansError(UnsupportedModelError):
    """Planning would take longer than training: more than half of the last calls needed a plan."""


class NewPlans:
    """When something was planned anew.

    Attributes:
        num_calls: training calls so far.
        hands_over: whether there is another way than plans, so that many of them are an error.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.hands_over = False
        self._planned_at: list[tuple[int, bool]] = []  # number of the call, whether for a value
        self._has_told = False

    def add(self, reason: str, *, is_value: bool) -> None:
        """Counts a call that needs a plan.

        Args:
            reason: why, in words.
            is_value: whether for one of many possible values.

        Raises:
            ManyPlansError: there were many, and there is another way.
        """
        self._planned_at.append((self.num_calls, is_value))
        for few, counted in (
            (FEW_VALUES, [at for at, is_one in self._planned_at if is_one]),
            (FEW_FORMS, [at for at, _ in self._planned_at]),
        ):
            num_calls = self.num_calls - counted[-few - 1] + 1 if len(counted) > few else None
            if num_calls is not None and num_calls <= 2 * few:
                self._tell(f"{few + 1} of the last {num_calls} training calls", reason)

    def _tell(self, how_many: str, reason: str) -> None:
        if self.hands_over:
            msg = f"{how_many} each needed a plan of its own, at last because {reason}."
            raise ManyPlansError(msg)
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "%s each needed a plan of its own, at last because %s. Planning takes seconds. "
                "Let the forward read no values that are new in each call, and pad batches to few "
                "sizes. %s",
                how_many, reason, FRAMES_ADVICE,
            )  # fmt: skip
