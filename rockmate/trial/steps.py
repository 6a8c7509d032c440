"""Which steps are trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rockmate.errors import check_choice

TrialOption = Literal["log", "always", "never"]
_CHOICES = ("log", "always", "never")


@dataclass(slots=True)
class TrialSteps:
    """Which steps of a plan are trials: 1, 2, 4, 8, and so on; or all, or none."""

    option: TrialOption = "log"
    num_steps: int = 0
    _is_due: bool = False

    def __post_init__(self) -> None:
        """Raises `InvalidArgumentError` unless the option is one."""
        check_choice("trial", self.option, _CHOICES)

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
        return is_trial
