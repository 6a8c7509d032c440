"""The table's arrays: for each subchain and slot, the least time and the exact peak of its plan.

A slot stands for a budget. Slots are a whole number of units below ``max_budget_bytes``. An entry
is the fastest plan found whose exact peak fits into its slot's budget. The plan of the smallest
peak of each subchain stands beside the table. Symbols: see ``solve.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rotor.terms import Floats, Ints

# Number of slots in a block: the unit in which slots are skipped where no recomputation can win.
BLOCK_SLOTS = 16
# In place of a slot: the subchain's plan of the smallest peak, whatever its time.
MIN_PEAK_SLOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The plan of a subchain at a slot.

    Attributes:
        time: Ticks.
        peak: Exact bytes beside the subchain's input.
        slot: The first slot with this plan.
    """

    time: float
    peak: int
    slot: int


class Entries:
    """The arrays of a table and how to read them.

    Attributes:
        max_budget_bytes: Budget of the last slot.
        unit_bytes: Difference of the budgets of neighbouring slots.
        num_blocks: Number of blocks of slots.
        width: Number of slots. The first has a budget below 0, into which nothing fits.
        slots: All slots.
        budgets: Their budgets in bytes.
        time: Ticks, at [row, slot]; infinite where nothing fits.
        peak: Bytes, at [row, slot].
        min_peak_time: Ticks of the plan of the smallest peak, by row.
        min_peak: Its bytes, by row.
    """

    def __init__(self, num_stages: int, max_budget_bytes: int, num_slots: int) -> None:
        """Allocate the arrays; entries of empty subchains are 0."""
        self.max_budget_bytes = max_budget_bytes
        self.unit_bytes: int = max(1, -(-max_budget_bytes // num_slots))
        self.num_blocks: int = (-(-max_budget_bytes // self.unit_bytes) + 1) // BLOCK_SLOTS + 1
        self.width: int = self.num_blocks * BLOCK_SLOTS
        self.slots: Ints = np.arange(self.width)
        self.budgets: Ints = max_budget_bytes - self.unit_bytes * self.slots[::-1]
        # Rows by length: first the empty subchains (s, s - 1), then (s, s), and so on.
        lengths = np.arange(num_stages + 1, 0, -1)
        self._row_of_length: Ints = np.concatenate(([0], np.cumsum(lengths)))
        self.num_rows = int(self._row_of_length[-1])
        self.time: Floats = np.empty((self.num_rows, self.width), np.float64)
        self.peak: Ints = np.empty((self.num_rows, self.width), np.int64)
        self.time[: num_stages + 1], self.peak[: num_stages + 1] = 0.0, 0
        self.min_peak_time: Floats = np.zeros(self.num_rows, np.float64)
        self.min_peak: Ints = np.zeros(self.num_rows, np.int64)

    def row(self, s: Any, t: Any) -> Any:
        """Return the row of subchain ``s``..``t``, as numbers or arrays; ``t >= s - 1``."""
        return self._row_of_length[t - s + 1] + s

    def entry(self, s: int, t: int, slot: int) -> Entry:
        """Return the entry of a slot, from the first slot that holds the same."""
        row = self.row(s, t)
        time = float(self.time[row, slot])
        first = slot + 1 - int(np.searchsorted(self.time[row, slot::-1], time, side="right"))
        return Entry(time=time, peak=int(self.peak[row, slot]), slot=first)

    def min_peak_entry(self, s: int, t: int) -> Entry:
        """Return the plan of the smallest peak of a subchain."""
        row = self.row(s, t)
        return Entry(
            time=float(self.min_peak_time[row]), peak=int(self.min_peak[row]), slot=MIN_PEAK_SLOT
        )

    def entry_beside(self, s: int, t: int, slot: int, charge: int) -> Entry:
        """Return the plan that fits a slot's budget with ``charge`` bytes held beside it."""
        if s > t:
            return Entry(time=0.0, peak=0, slot=slot)
        if slot == MIN_PEAK_SLOT:
            return self.min_peak_entry(s, t)
        whole, rest = divmod(charge, self.unit_bytes)
        slot -= whole
        if slot >= 0 and self.peak[self.row(s, t), slot] > self.budgets[slot] - rest:
            slot -= 1
        return self.entry(s, t, slot) if slot >= 0 else Entry(time=math.inf, peak=0, slot=0)
