"""Counts the calls of one module for which something had to be planned anew."""

from __future__ import annotations

import logging
import time

from rockmate.errors import FRAMES_ADVICE, UnsupportedModelError

logger = logging.getLogger(__name__)

# Plans for values that may go on for ever: constants of calls, what the forward reads. Fewer where
# no plan has served a second call and they have taken long, or where they can only be told of.
FEW_VALUES, _FEW_SLOW, _FEW_TOLD = 4, 1, 2
FEW_FORMS = 16  # plans for what has few values, as a rule: keywords, sizes
_LONG_S, _LONG_STEPS = 20.0, 300  # seconds, and times of a step without recomputation


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
        self.hands_over = self._has_handed_over = False
        self._begin_s = self._spent_s = self._step_s = 0.0
        self._planned_at: list[tuple[int, bool]] = []  # number of the call, whether for a value
        self._has_told = False

    def begin_call(self) -> None:
        """Counts a training call, which begins."""
        self.num_calls, self._begin_s = self.num_calls + 1, time.perf_counter()

    def note_plan(self, step_ms: float) -> None:
        """A plan is there, of a step that takes so long without recomputation."""
        self._spent_s += time.perf_counter() - self._begin_s if self.num_calls else 0.0
        self._step_s = step_ms / 1e3

    def add(self, reason: str, *, is_value: bool) -> None:
        """Counts a call that needs a plan.

        Args:
            reason: why, in words.
            is_value: whether for one of many possible values.

        Raises:
            ManyPlansError: there were many, and there is another way.
        """
        if (self.num_calls, is_value) not in self._planned_at[-1:]:  # one call may need two
            self._planned_at.append((self.num_calls, is_value))
        of_values = [at for at, is_one in self._planned_at if is_one]
        spent_s = self._spent_s + time.perf_counter() - self._begin_s
        few_values = FEW_VALUES if self.hands_over else _FEW_TOLD
        if spent_s > max(_LONG_S, _LONG_STEPS * self._step_s):
            few_values = _FEW_SLOW if len(of_values) >= self.num_calls - 1 else few_values
        for few, counted in (
            (few_values, of_values),
            (FEW_FORMS, [at for at, _ in self._planned_at]),
        ):
            num_calls = self.num_calls - counted[-few - 1] + 1 if len(counted) > few else None
            if num_calls is not None and num_calls <= 2 * few:
                self._tell(f"{few + 1} of the last {num_calls} training calls", reason)

    def go_on(self, error: Exception) -> bool:
        """Whether plans are made on, since what they were left for has ended in an error."""
        if self._has_handed_over:
            logger.warning("plans are made on, which takes long, since %s", error)
            self.hands_over = self._has_handed_over = False
            return True
        return False

    def _tell(self, how_many: str, reason: str) -> None:
        if self.hands_over:
            self._has_handed_over = True
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
