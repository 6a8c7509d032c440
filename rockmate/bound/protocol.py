"""What a plan is held against: a time that no schedule within its budget beats, worked out when it is asked for, or read from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol


class Bounds(Protocol):
    """Lower bounds on the time of the schedules of one graph or of several, in milliseconds; infinite where none can fit."""

    def bound_ms(self, budget_bytes: int) -> float:
        """What is proved fast: in a few milliseconds for a budget, once the graphs are there."""
        ...

    def tight_bound_ms(self, budget_bytes: int) -> float:
        """The same or above, which may take seconds."""
        ...


@dataclass(frozen=True, slots=True)
class StoredBound:
    """One bound for the one budget that is asked for.

    Attributes:
        ms: the bound; 0 where nothing is proved.
    """

    ms: float = 0.0

    def bound_ms(self, budget_bytes: int) -> float:
        """The bound."""
        del budget_bytes
        return self.ms

    tight_bound_ms = bound_ms


@dataclass(frozen=True, slots=True)
class MinBound:
    """What bounds the schedules of several graphs, of which any may run: the least of their bounds.

    Attributes:
        each: of every graph; called when a bound is asked for, which may take seconds the first time.
    """

    each: Callable[[], Iterable[Bounds]]

    def bound_ms(self, budget_bytes: int) -> float:
        """The least."""
        return min((bounds.bound_ms(budget_bytes) for bounds in self.each()), default=inf)

    def tight_bound_ms(self, budget_bytes: int) -> float:
        """The least of the closer ones. Those are not worked out of graphs whose quick bound is no less than the least known."""
        least_ms = inf
        for bounds in sorted(self.each(), key=lambda bounds: bounds.bound_ms(budget_bytes)):
            if bounds.bound_ms(budget_bytes) >= least_ms:
                break
            least_ms = min(least_ms, bounds.tight_bound_ms(budget_bytes))
        return least_ms
