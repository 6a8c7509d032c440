"""What a plan is held against: a time that no schedule within its budget beats, worked out when it is asked for, or read from a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Bounds(Protocol):
    """Lower bounds on the time of a step's schedules, in milliseconds; infinite where none can fit."""

    def bound_ms(self, budget_bytes: int) -> float:
        """What is proved fast, in a few milliseconds for a budget."""
        ...

    def closer_bound_ms(self, budget_bytes: int) -> float:
        """The same or above, which may take seconds."""
        ...


@dataclass(frozen=True, slots=True)
class KnownBound:
    """One bound for the one budget that is asked for.

    Attributes:
        ms: the bound; 0 where nothing is proved.
    """

    ms: float = 0.0

    def bound_ms(self, budget_bytes: int) -> float:
        """The bound."""
        del budget_bytes
        return self.ms

    closer_bound_ms = bound_ms
