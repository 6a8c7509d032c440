"""Fills the table, from short subchains to the whole chain, with numpy on many entries at once.

Recurrence and symbols: see ``solve.py``. All subchains of one length are filled together, in groups
of a size that suits the cache. A recomputation's two parts are stored by blocks of slots. Since
times never rise from slot to slot, a recomputation that is slower at a block's end than the best
before the block wins nowhere in it, and the block is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rotor.entries import BLOCK_SLOTS, Entries
from rotor.terms import Floats, Ints, Terms

# Peak of a plan that does not exist.
INF_BYTES = np.iinfo(np.int64).max
# A time above that of any plan, and yet finite.
INF_TIME = np.finfo(np.float64).max
# Numbers in one working array. With fewer, calls cost more; with more, the cache misses.
CHUNK_SIZE = 2**16


class _PartTimes:
    """Times of one part of every recomputation, by blocks of slots: neighbours are read together.

    A *place* stands for a subchain. Its order suits the reads.
    """

    def __init__(self, num_blocks: int, num_places: int) -> None:
        self.blocks: Floats = np.empty((num_blocks, num_places, BLOCK_SLOTS), np.float64)
        # Times at the last slot of each block.
        self.ends: Floats = np.empty((num_places, num_blocks), np.float64)

    def enter(self, places: Ints, times: Floats) -> None:
        """Enter the times of all slots."""
        blocks = times.reshape(len(places), -1, BLOCK_SLOTS)
        self.blocks[:, places] = blocks.swapaxes(0, 1)
        self.ends[places] = blocks[:, :, -1]

    def of_block(self, block: Ints, place: Ints) -> Floats:
        """Return the times of one block for each place."""
        num_places = self.blocks.shape[1]
        return self.blocks.reshape(-1, BLOCK_SLOTS).take(block * num_places + place, axis=0)


class _Recomputations(NamedTuple):
    """The recomputations of some subchains ``s``..``t``; arrays at [subchain, boundary].

    Attributes:
        j: The boundary that is kept.
        left: Row of ``s``..``j - 1``.
        right: Row of ``j``..``t``.
        place_before: Place of ``s``..``j - 1`` among the times before.
        place_beside: Place of ``j``..``t`` among the times beside.
        forward_peak: Peak of the forward from ``s`` to ``j``.
        first_slot: First slot whose budget holds that peak.
    """

    j: Ints
    left: Ints
    right: Ints
    place_before: Ints
    place_beside: Ints
    forward_peak: Ints
    first_slot: Ints


class TableFiller:
    """Fills the entries of one chain; ``fill`` does it all."""

    def __init__(self, terms: Terms, entries: Entries) -> None:
        """Allocate the working arrays."""
        self._terms, self._entries = terms, entries
        n, num_blocks = terms.num_stages, entries.num_blocks
        self._peak_windows = sliding_window_view(entries.peak.reshape(-1), entries.width)
        self._time_windows = sliding_window_view(entries.time.reshape(-1), entries.width + 1)
        size = max(CHUNK_SIZE, terms.cost.shape[1] * entries.width)
        self._buffers = np.empty(size, np.int64), np.empty(size, np.int64)
        # The two parts of a recomputation: Opt(s, j-1) with the forward to j, and Opt(j, t) with
        # x_j counted.
        self._before = _PartTimes(num_blocks, n * (n + 1) // 2)
        self._beside = _PartTimes(num_blocks, n * (n + 1) // 2)
        # By row: the least time without a budget, and the first slot whose plan takes that.
        self._unlimited: Floats = np.zeros(entries.num_rows, np.float64)
        self._fastest_from: Ints = np.zeros(entries.num_rows, np.int64)

    def fill(self) -> None:
        """Fill every entry; the plans of the smallest peak must stand already."""
        terms, entries = self._terms, self._entries
        n = terms.num_stages
        for more in range(n):  # the number of stages after the first
            for s in _groups(n - more, terms.cost.shape[1] * entries.width):
                self._keep(s, s + more, self._rows(s, more))
            for s in _groups(n - more, entries.width + more * entries.num_blocks):
                t, rows = s + more, self._rows(s, more)
                slots = self._useful_slots(rows)
                if more:
                    self._recompute(s, t, rows, slots)
                self._propagate(rows, slots)
                self._store_part_times(s, t, rows)

    def _rows(self, s: Ints, more: int) -> slice:
        """Return the rows of consecutive subchains of one length."""
        row = self._entries.row
        return slice(row(s[0], s[0] + more), row(s[-1], s[-1] + more) + 1)

    def _useful_slots(self, rows: slice) -> slice:
        """Return whole blocks of slots: before them no plan fits, after them none is faster."""
        last = min(int(self._fastest_from[rows].max()), self._entries.width - 1)
        first = min(int(self._slot_of(self._entries.min_peak[rows]).min()), last)
        return slice(first // BLOCK_SLOTS * BLOCK_SLOTS, (last // BLOCK_SLOTS + 1) * BLOCK_SLOTS)

    # --- keep ---

    def _keep(self, s: Ints, t: Ints, rows: slice) -> None:
        """Enter the best plans of subchains ``s``..``t`` whose first step keeps a span.

        Set too: the subchains' least times without a budget, and the first slots that reach them.
        """
        terms, entries = self._terms, self._entries
        cost = np.where(terms.last[s] <= t[:, None], terms.cost[s], np.inf)
        rest = entries.row(np.minimum(terms.last[s], t[:, None]) + 1, t[:, None])
        saved = terms.saved[s]
        # The least budget of each option: the peaks of its own forward and backward.
        least = np.maximum(
            terms.forward_peak[s] + terms.at_rest[t][:, None], terms.backward_peak[s]
        )
        self._set_unlimited(rows, rest, cost, np.maximum(saved + entries.peak[rest, -1], least))
        slots = self._useful_slots(rows)
        first = np.maximum(self._slot_of(least), saved // entries.unit_bytes)
        time = self._charged(rest.ravel(), saved.ravel(), first.ravel(), slots)
        time += cost.reshape(-1, 1)
        width = slots.stop - slots.start
        time = time.reshape(*cost.shape, width)
        best = np.min(time, axis=1, out=entries.time[rows, slots])
        entries.time[rows, : slots.start], entries.time[rows, slots.stop :] = np.inf, best[:, -1:]
        option, slot = _divmod(
            np.flatnonzero(time == np.where(best < np.inf, best, -1.0)[:, None]), width
        )
        slot += slots.start
        peak = self._charged_peak(rest.ravel()[option], saved.ravel()[option], slot)
        np.maximum(peak, least.ravel()[option], out=peak)
        entries.peak[rows] = INF_BYTES
        np.minimum.at(
            entries.peak[rows].reshape(-1), option // cost.shape[1] * entries.width + slot, peak
        )

    def _set_unlimited(self, rows: slice, rest: Ints, cost: Floats, enough: Ints) -> None:
        """Set the least times without a budget and the first slots that reach them.

        Args:
            rows: Rows of the subchains.
            rest: Row of what follows each option's span.
            cost: Ticks of each option.
            enough: Bytes in which each option fits with the fastest plan of the rest.
        """
        fastest = cost + self._unlimited[rest]
        self._unlimited[rows] = fastest.min(axis=1)
        is_slower = fastest > self._unlimited[rows][:, None]
        is_rest_slower = self._entries.time[rest, -1] > self._unlimited[rest]
        enough[is_slower | is_rest_slower] = INF_BYTES
        self._fastest_from[rows] = self._slot_of(enough.min(axis=1))

    # --- recompute ---

    def _recompute(self, s: Ints, t: Ints, rows: slice, slots: slice) -> None:
        """Enter the plans that keep a boundary ``j`` to recompute from, where they are better."""
        recomputations = self._recomputations(s, t)
        blocks = slice(slots.start // BLOCK_SLOTS, slots.stop // BLOCK_SLOTS)
        group, boundary = self._contenders(recomputations, rows, blocks)
        if not group.size:
            return
        subchain, block = _divmod(group, blocks.stop - blocks.start)
        block += blocks.start
        pair = subchain * recomputations.j.shape[1] + boundary
        times = self._recomputation_times(recomputations, pair, block)
        self._enter_recomputations(recomputations, rows, group, subchain, block, pair, times)

    def _recomputations(self, s: Ints, t: Ints) -> _Recomputations:
        terms, row = self._terms, self._entries.row
        j = s[:, None] + np.arange(1, t[0] - s[0] + 1)
        forward_peak = terms.rerun_peak[s[:, None], j - 1] + terms.at_rest[t][:, None]
        return _Recomputations(
            j=j,
            left=row(s[:, None], j - 1),
            right=row(j, t[:, None]),
            place_before=self._place_before(s[:, None], j - 1),
            place_beside=_place_beside(j, t[:, None]),
            forward_peak=forward_peak,
            first_slot=self._slot_of(forward_peak),
        )

    def _contenders(
        self, recomputations: _Recomputations, rows: slice, blocks: slice
    ) -> tuple[Ints, Ints]:
        """Return the recomputations that may win, as pairs: (subchain and block), boundary.

        A recomputation is at its fastest at a block's end. It wins nowhere in the block unless it
        is there as fast as the best is at the end of the block before.
        """
        last_slots = self._entries.slots[BLOCK_SLOTS - 1 :: BLOCK_SLOTS][blocks]
        ends = self._before.ends[recomputations.place_before, blocks]
        ends += self._beside.ends[recomputations.place_beside, blocks]
        ends[last_slots < recomputations.first_slot[..., None]] = np.inf
        best_ends = np.minimum(ends.min(axis=1), self._entries.time[rows, last_slots])
        to_beat = np.full_like(best_ends, INF_TIME)
        np.minimum(best_ends[:, :-1], INF_TIME, out=to_beat[:, 1:])
        may_win = np.ascontiguousarray((ends <= to_beat[:, None]).swapaxes(1, 2))
        return _divmod(np.flatnonzero(may_win), recomputations.j.shape[1])

    def _recomputation_times(
        self, recomputations: _Recomputations, pair: Ints, block: Ints
    ) -> Floats:
        """Return the times of recomputations in one block each; infinite where they do not fit."""
        times = self._before.of_block(block, recomputations.place_before.ravel()[pair])
        times += self._beside.of_block(block, recomputations.place_beside.ravel()[pair])
        first, begin = recomputations.first_slot.ravel()[pair], block * BLOCK_SLOTS
        late = np.flatnonzero(first > begin)
        times[late] = np.where(
            self._entries.slots[:BLOCK_SLOTS] < (first - begin)[late, None], np.inf, times[late]
        )
        return times

    def _enter_recomputations(
        self,
        recomputations: _Recomputations,
        rows: slice,
        group: Ints,
        subchain: Ints,
        block: Ints,
        pair: Ints,
        times: Floats,
    ) -> None:
        """Enter the recomputations as fast as the keeps or faster; of ties, the least peak."""
        entries = self._entries
        changes = np.flatnonzero(np.diff(group, prepend=-1))
        best = np.minimum.reduceat(times, changes, axis=0)
        place = subchain * entries.num_blocks + block
        place_of = place[changes]
        time = entries.time[rows].reshape(-1, BLOCK_SLOTS)
        peak = entries.peak[rows].reshape(-1, BLOCK_SLOTS)
        kept = time[place_of]
        least = self._unlimited[rows][subchain[changes], None]
        wins = (best <= kept) & (best < np.inf) & (kept > least)
        counts = np.diff(changes, append=group.size)
        # Peaks matter only where a recomputation is as fast as the keeps.
        winner = np.repeat(np.where(wins, best, -1.0), counts, axis=0)
        row, column = _divmod(np.flatnonzero(times == winner), BLOCK_SLOTS)
        slot, of_row = block[row] * BLOCK_SLOTS + column, pair[row]
        charge = self._terms.input[recomputations.j.ravel()[of_row]]
        tied_peak = self._charged_peak(recomputations.right.ravel()[of_row], charge, slot)
        np.maximum(
            tied_peak, entries.peak[recomputations.left.ravel()[of_row], slot], out=tied_peak
        )
        np.maximum(tied_peak, recomputations.forward_peak.ravel()[of_row], out=tied_peak)
        peak[place_of] = np.where(wins & (best < kept), INF_BYTES, peak[place_of])
        time[place_of] = np.where(wins, best, kept)
        np.minimum.at(peak.reshape(-1), place[row] * BLOCK_SLOTS + column, tied_peak)

    def _store_part_times(self, s: Ints, t: Ints, rows: slice) -> None:
        """Store the times of finished subchains as parts of longer subchains' recomputations."""
        entries, charge = self._entries, self._terms.input[s]
        charged = self._charged(
            entries.row(s, t), charge, charge // entries.unit_bytes, slice(0, entries.width)
        )
        self._beside.enter(_place_beside(s, t), charged)
        rerun = self._terms.rerun[s, t]
        self._before.enter(self._place_before(s, t), entries.time[rows] + rerun[:, None])

    def _place_before(self, s: Ints, t: Ints) -> Ints:
        """Return the places where those of one ``s`` lie side by side."""
        return s * self._terms.num_stages - s * (s + 1) // 2 + t

    # --- slots ---

    def _propagate(self, rows: slice, slots: slice) -> None:
        """Replace each peak by that of the first slot as fast, whose plan has the smaller peak."""
        entries = self._entries
        time, peak = entries.time[rows, slots], entries.peak[rows, slots]
        # Where nothing fits, the peak is 0.
        entries.peak[rows, : slots.start] = 0
        peak[:, 0][time[:, 0] == np.inf] = 0
        drops = np.zeros(time.shape, np.int64)
        np.multiply(time[:, 1:] < time[:, :-1], entries.slots[1 : time.shape[1]], out=drops[:, 1:])
        np.maximum.accumulate(drops, axis=1, out=drops)
        peak[:] = np.take_along_axis(peak, drops, axis=1)
        entries.peak[rows, slots.stop :] = peak[:, -1:]

    def _charged(self, rows: Ints, charge: Ints, first: Ints, slots: slice) -> Floats:
        """Return the times of rows at some slots with a charge of bytes held beside each.

        They are infinite before the first slot that is given for each. From there on, the entry of
        a slot is the last one whose peak and charge fit into the slot's budget. That is the entry
        as many slots earlier as the charge has whole units, or the one before.
        """
        entries = self._entries
        start = rows * entries.width - np.minimum(charge // entries.unit_bytes, entries.width - 1)
        shape = (len(rows), slots.stop - slots.start)
        spare, chosen = (buffer[: math.prod(shape)].reshape(shape) for buffer in self._buffers)
        np.subtract(entries.budgets[slots], charge[:, None], out=spare)
        spare -= self._peak_windows[start, slots]
        # All bits set where the entry before has to be taken, else none.
        spare >>= 63
        times = self._time_windows[start - 1, slots.start : slots.stop + 1].view(np.int64)
        # Chosen by bits: a branch for each would mostly be mispredicted.
        np.bitwise_xor(times[:, 1:], times[:, :-1], out=chosen)
        chosen &= spare
        chosen ^= times[:, 1:]
        charged = chosen.view(np.float64)
        np.copyto(charged, np.inf, where=entries.slots[slots] < first[:, None])
        return charged

    def _charged_peak(self, rows: Ints, charge: Ints, slot: Ints) -> Ints:
        """Return the peaks that belong to entries of ``_charged``, the charge included."""
        entries = self._entries
        peaks = entries.peak.reshape(-1)
        source = rows * entries.width + slot - charge // entries.unit_bytes
        return peaks[source - (peaks[source] + charge > entries.budgets[slot])] + charge

    def _slot_of(self, size_bytes: Ints) -> Ints:
        """Return the first slots whose budget holds the sizes; the width where none does."""
        entries = self._entries
        size_bytes = np.minimum(size_bytes, entries.max_budget_bytes + 1)
        return entries.width - 1 - (entries.max_budget_bytes - size_bytes) // entries.unit_bytes


def fill_min_peak(terms: Terms, entries: Entries) -> None:
    """Find the exact smallest peak of every subchain, and the time of a plan that has it."""
    n = terms.num_stages
    time, peak = entries.min_peak_time, entries.min_peak
    for more in range(n):
        s = np.arange(n - more)
        t = s + more
        rest = entries.row(np.minimum(terms.last[s], t[:, None]) + 1, t[:, None])
        keep_time = np.where(terms.last[s] <= t[:, None], terms.cost[s], np.inf) + time[rest]
        keep_peak = np.maximum(
            terms.forward_peak[s] + terms.at_rest[t][:, None], terms.backward_peak[s]
        )
        np.maximum(keep_peak, terms.saved[s] + peak[rest], out=keep_peak)
        keep_peak[keep_time == np.inf] = INF_BYTES
        j = s[:, None] + np.arange(1, more + 1)
        left, right = entries.row(s[:, None], j - 1), entries.row(j, t[:, None])
        recompute_time = terms.rerun[s[:, None], j - 1] + time[right] + time[left]
        recompute_peak = np.maximum(terms.input[j] + peak[right], peak[left])
        forward_peak = terms.rerun_peak[s[:, None], j - 1] + terms.at_rest[t][:, None]
        np.maximum(recompute_peak, forward_peak, out=recompute_peak)
        times, peaks = (
            np.hstack((keep_time, recompute_time)),
            np.hstack((keep_peak, recompute_peak)),
        )
        least = peaks.min(axis=1)
        rows = entries.row(s, t)
        peak[rows] = least
        time[rows] = np.where(peaks == least[:, None], times, np.inf).min(axis=1)


def _divmod(numbers: Ints, by: int) -> tuple[Ints, Ints]:
    """Return quotients and remainders; ``np.divmod`` takes several times as long."""
    quotients = numbers // by
    return quotients, numbers - quotients * by


def _place_beside(s: Ints, t: Ints) -> Ints:
    """Return the places where those of one ``t`` lie side by side."""
    return t * (t + 1) // 2 + s


def _groups(count: int, size: int) -> Iterator[Ints]:
    """Yield the numbers below ``count`` in runs of ``CHUNK_SIZE`` or less, at ``size`` each."""
    step = max(1, CHUNK_SIZE // size)
    for begin in range(0, count, step):
        yield np.arange(begin, min(begin + step, count))
