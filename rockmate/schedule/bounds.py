"""Lower bounds on step time as plans see them: computed when asked for, or loaded with a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol


class Bounds(Protocol):
    """Lower bounds on the time of the schedules of one graph, or of several.

    Times are in milliseconds, infinite where no schedule fits the budget.
    """

    def bound_ms(self, budget_bytes: int) -> float:
        """The bound of a budget: a few milliseconds, once the graphs exist."""
        ...


@dataclass(frozen=True, slots=True)
class StoredBound:
    """A bound that was computed before, for the one budget that it is asked for.

    Attributes:
        ms: the bound; 0 if nothing is proved.
    """

    ms: float = 0.0

    def bound_ms(self, budget_bytes: int) -> float:
        """The bound."""
        del budget_bytes
        return self.ms


@dataclass(frozen=True, slots=True)
class MinBound:
    """The bound of a step that may run as any of several graphs: the least of their bounds.

    Attributes:
        each: gives the bounds of every graph. It is called when a bound is asked for, and may take
            seconds the first time.
    """

    each: Callable[[], Iterable[Bounds]]

    def bound_ms(self, budget_bytes: int) -> float:
        """The least of the bounds."""
        return min((bounds.bound_ms(budget_bytes) for bounds in self.each()), default=inf)
