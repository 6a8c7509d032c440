"""Which steps are trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TrialOption = Literal["log", "always", "never"]
_CHOICES = ("log", "always", "never")


def check_trial(option: str) -> None:
    """Raises `ValueError` unless it is a value of that argument of `RockmateModule`."""
    if option not in _CHOICES:
        msg = f"trial is {option!r}; choose 'log', 'always' or 'never'"
        raise ValueError(msg)


@dataclass(slots=True)
class TrialSteps:
    """Which steps of a plan are trials: 1, 2, 4, 8, and so on; or all, or none."""

    option: TrialOption = "never"
    num_steps: int = 0
    _is_due: bool = False

    def is_next(self, *, can_run: bool) -> bool:
        """Counts one more step; whether it is a trial.

        Args:
            can_run: whether it can be one; else the next step is one in its place.
        """
        self.num_steps += 1
        is_power = self.num_steps & (self.num_steps - 1) == 0
        self._is_due |= self.option == "always" or (self.option == "log" and is_power)
        is_trial = self._is_due and can_run
        self._is_due &= not is_trial
        return is_trial
