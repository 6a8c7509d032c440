"""Which steps are trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rockmate.errors import check_choice

TrialOption = Literal["log", "always", "never"]
_MOST_S, _MOST_LATER_S = 0.5, 0.06  # for gradients, at the first trial and at others


@dataclass(slots=True)
class TrialSteps:
    """Which steps of a plan are trials: 1, 2, 4, 8, and so on; or all, or none."""

    option: TrialOption = "log"
    num_steps: int = 0
    forward_s: float = 0.0  # processor time of the last plain forward
    _is_due: bool = False
    num_trials: int = 0

    @property
    def has_time(self) -> bool:
        """Whether the trial at hand may take what both backwards do: some six forwards."""
        is_first = self.num_trials == 1 or self.option == "always"
        return 6 * self.forward_s <= (_MOST_S if is_first else _MOST_LATER_S)

    def __post_init__(self) -> None:
        """Raises `InvalidArgumentError` unless the option is one."""
        check_choice("trial", self.option, get_args(TrialOption))

    def is_next(self, *, can_run: bool, is_due: bool = False) -> bool:
        """Counts one more step; whether it is a trial.

        Args:
            can_run: whether it can be one; else the next step is one in its place.
            is_due: whether it is to be one whatever its number, unless none is.
        """
        self.num_steps += 1
        is_power = self.num_steps & (self.num_steps - 1) == 0
        self._is_due |= self.option == "always" or (self.option == "log" and (is_due or is_power))
        is_trial = self._is_due and can_run
        self._is_due &= not is_trial
        self.num_trials += is_trial
        return is_trial
