"""Rotor: the fastest persistent schedule of a chain within a memory budget, for every budget at once.

Also known as optimal checkpointing for heterogeneous chains. A dynamic program over (first stage, last stage,
memory): Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains:
how to train deep neural networks with limited memory", 2019; with several options for each stage, Rockmate:
Zhao et al., ICML 2023; here also with options for spans of stages. On a uniform chain of one option it gives
the binomial schedules of Griewank and Walther's revolve, 2000.

Optimal among *persistent* schedules: what is kept stays until the backward that it was kept for. A schedule
that drops a kept boundary early and makes it again later can be faster on some heterogeneous chains; it is
not searched for (to find the best of all of them is NP-hard). Nor does it overlap steps, or move anything to
another memory.

Symbols, as in the papers:

    s, t         first and last stage of a subchain, beside whose input x_s memory is counted
    m            bytes of memory; Opt(s, t, m) is the least time of subchain s..t within m
    x_s, d_s     boundary that enters stage s; gradient of the boundary that leaves it
    g_s          parameter gradients that stay behind after the backward of stage s
    G_t          sum of g_i over i > t: ``left_behind[t]``; d_t + G_t is ``at_rest[t]``
    e, o         last stage and option of a span (s, e)
    j            the boundary kept by a redo

    Opt(t+1, t, m) = 0, and otherwise Opt(s, t, m) = min of
      keep   over e <= t and o:  f_o + b_o + Opt(e+1, t, m - saved_o)
             if forward_peak_o + d_t + G_t <= m and backward_peak_o + G_e <= m
      redo   over s < j <= t:    f_s + .. + f_(j-1) + Opt(j, t, m - x_j) + Opt(s, j-1, m)
             if forward_peak_k + (x_k if k > s) + d_t + G_t <= m for each k from s to j-1

**Rounding.** Sizes are never rounded. The budgets of the table are ``max_budget_bytes`` and what lies whole
units below it, and each entry holds, with the time, its plan's exact peak; an entry is used wherever that
peak fits. So every plan fits in bytes, no size costs a slot for being small, and a chain whose subchains have
at most one useful plan a slot (any chain when the unit is 1 byte; small storages beside huge ones) is solved
exactly. Something is lost only where a subchain has several useful plans within one slot, of which the
fastest stays: less than one unit for each storage held at a time, and one for the query. The bound: the time
found at budget m is at most the optimum at m - num_stages * unit, and at ``max_budget_bytes`` itself one unit
closer. Beside the table, the plan of the smallest peak is found exactly.

Times are rounded to about 15 digits of the chain's largest plan, so that sums of them are exact in any order,
and plans of equal time tie. Ties go to the smaller peak, then keep before redo, then the shorter span, the
lower option, the earlier boundary.

Cost: n^2 / 2 * num_slots entries, of 16 bytes each, and 18 more while the table is filled; time n^2 / 2 *
options * num_slots for the keeps. For the redos n^3 / 6 * num_slots at most: a block of slots is passed over
where a redo is slower at its end than the best is before it, since times never rise from slot to slot. Passed
over are also the blocks in which nothing fits, and those after which nothing gets faster.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from rotor.chain import Chain, Option, check_size
from rotor.sequence import Backward, ForwardKeep, ForwardOnly, Sequence, Step

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_SMALLEST = -1  # stands for a slot: the subchain's plan of the smallest peak, whatever its time
_MUCH = np.iinfo(np.int64).max
_SLOW = np.finfo(np.float64).max  # slower than any plan, and yet finite
_BLOCK = 16  # slots that are passed over at once where no redo can win
_CHUNK = (
    2**16
)  # numbers in an array of what is worked on at once: fewer cost calls, more miss the cache


class InfeasibleBudgetError(ValueError):
    """No persistent schedule fits in the budget.

    Attributes:
        budget_bytes: What was asked for.
        minimum_bytes: The smallest budget that some schedule fits in, exactly.
    """

    def __init__(self, budget_bytes: int, minimum_bytes: int) -> None:
        """Say both numbers."""
        super().__init__(
            f"budget_bytes is {budget_bytes}; no schedule fits in less than {minimum_bytes} bytes"
        )
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes

    def __reduce__(self) -> tuple[type[InfeasibleBudgetError], tuple[int, int]]:
        """Let the error cross a process boundary with both numbers."""
        return type(self), (self.budget_bytes, self.minimum_bytes)


def solve_table(chain: Chain, max_budget_bytes: int, num_slots: int = 1000) -> Table:
    """Return the table of the least times of ``chain`` for every budget up to ``max_budget_bytes``.

    Args:
        chain: The stages, and the options of their spans.
        max_budget_bytes: The largest budget that will be asked for, beside the chain's input.
        num_slots: How many budgets the table tells apart, at least 1; time and memory grow in proportion.

    Returns:
        The table. Each of its plans has an exact peak within its budget; see the module for what rounding can
        cost.

    Raises:
        ValueError: A number is not whole, or out of range.
    """
    _check_whole("max_budget_bytes", max_budget_bytes, least=0)
    check_size("max_budget_bytes", max_budget_bytes)
    _check_whole("num_slots", num_slots, least=1)
    return Table(chain, int(max_budget_bytes), int(num_slots))


def _check_whole(name: str, value: int, *, least: int | None = None) -> None:
    """Raise ``ValueError`` unless an argument is a whole number, and not below ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be a whole number (int)")
    if least is not None and value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """One entry of a subchain: time in ticks, exact peak beside the subchain's input, and its slot."""

    time: float
    peak: int
    slot: int


class _Terms:
    """The numbers of the recurrence, from the chain: bytes as they are, times in ticks."""

    def __init__(self, chain: Chain) -> None:
        stages = chain.stages
        self.num_stages = len(stages)
        self.input: Ints = np.array([stage.input_bytes for stage in stages], np.int64)
        gradients = [stage.parameter_gradient_bytes for stage in stages]
        self.left_behind: list[int] = [sum(gradients[t + 1 :]) for t in range(self.num_stages)]
        self.at_rest: Ints = np.array(
            [
                stage.output_gradient_bytes + left
                for stage, left in zip(stages, self.left_behind, strict=True)
            ],
            np.int64,
        )
        self.spans: list[list[tuple[int, tuple[Option, ...]]]] = [[] for _ in stages]
        for (first, last), options in sorted(chain.spans.items()):
            self.spans[first].append((last, options))
        slowest = [
            max(o.forward_ms + o.backward_ms for _, options in at for o in options)
            for at in self.spans
        ]
        # No plan runs a stage forward more than num_stages times, so 2**52 ticks are enough for any.
        bound_ms = sum(slowest) + self.num_stages * sum(stage.forward_ms for stage in stages)
        self.tick_ms: float = math.ldexp(1.0, max(math.frexp(bound_ms)[1] - 52, -1022))
        self._set_options()
        # [s, j - 1]: ticks, and peak beside x_s, of running stages s..j-1 forward-only.
        forward = [self.ticks(stage.forward_ms) for stage in stages]
        self.rerun: Floats = np.zeros((self.num_stages, self.num_stages), np.float64)
        self.rerun_peak: Ints = np.zeros((self.num_stages, self.num_stages), np.int64)
        for s in range(self.num_stages):
            peaks = [
                stages[k].forward_peak_bytes + (int(self.input[k]) if k > s else 0)
                for k in range(s, self.num_stages)
            ]
            self.rerun[s, s:] = list(accumulate(forward[s:]))
            self.rerun_peak[s, s:] = list(accumulate(peaks, max))

    def _set_options(self) -> None:
        """Lay out the options of all spans from stage ``s`` in row ``s``, those of short spans first."""
        rows = [[(e, option) for e, options in at for option in options] for at in self.spans]
        shape = (self.num_stages, max(map(len, rows)))
        self.cost: Floats = np.full(shape, np.inf)  # where a row has no option
        self.last: Ints = np.repeat(np.arange(shape[0])[:, None], shape[1], axis=1)
        self.saved: Ints = np.zeros(shape, np.int64)
        self.forward_peak: Ints = np.zeros(shape, np.int64)
        self.backward_peak: Ints = np.zeros(shape, np.int64)  # G_e included
        for s, row in enumerate(rows):
            for i, (e, option) in enumerate(row):
                self.cost[s, i], self.last[s, i] = self.cost_of(option), e
                self.saved[s, i], self.forward_peak[s, i] = (
                    option.saved_bytes,
                    option.forward_peak_bytes,
                )
                self.backward_peak[s, i] = option.backward_peak_bytes + self.left_behind[e]

    def ticks(self, time_ms: float) -> float:
        """Return a time as a whole number of ticks."""
        return float(round(time_ms / self.tick_ms))

    def cost_of(self, option: Option) -> float:
        """Return the time of an option's forward and backward in ticks."""
        return self.ticks(option.forward_ms + option.backward_ms)


class _Parts:
    """Times of one part of every redo, block by block, so that neighbouring places are read together."""

    def __init__(self, num_blocks: int, num_places: int) -> None:
        self.blocks: Floats = np.empty((num_blocks, num_places, _BLOCK), np.float64)
        self.ends: Floats = np.empty(
            (num_places, num_blocks), np.float64
        )  # the last slots of the blocks

    def enter(self, places: Ints, times: Floats) -> None:
        """Enter the times of all slots."""
        blocks = times.reshape(len(places), -1, _BLOCK)
        self.blocks[:, places] = blocks.swapaxes(0, 1)
        self.ends[places] = blocks[:, :, -1]

    def of_block(self, block: Ints, place: Ints) -> Floats:
        """Return the times of one block for each place."""
        num_places = self.blocks.shape[1]
        return self.blocks.reshape(-1, _BLOCK).take(block * num_places + place, axis=0)


class Table:
    """The least time of a chain for every budget, and sequences that reach it; made by ``solve_table``."""

    def __init__(self, chain: Chain, max_budget_bytes: int, num_slots: int) -> None:
        """Fill the table; use ``solve_table``, which checks the arguments."""
        self.chain = chain
        self.max_budget_bytes = max_budget_bytes
        self.unit_bytes: int = max(1, -(-max_budget_bytes // num_slots))
        self._terms = _Terms(chain)
        # Whole blocks of slots; the first slot has a budget below 0, so that nothing fits in it.
        self._num_blocks: int = (-(-max_budget_bytes // self.unit_bytes) + 1) // _BLOCK + 1
        self._width: int = self._num_blocks * _BLOCK
        self._slots: Ints = np.arange(self._width)
        self._budgets: Ints = max_budget_bytes - self.unit_bytes * self._slots[::-1]
        # Rows by length: first the empty subchains (s, s - 1), then (s, s), and so on.
        n = self._terms.num_stages
        self._row_of_length: Ints = np.concatenate(([0], np.cumsum(np.arange(n + 1, 0, -1))))
        num_rows = int(self._row_of_length[-1])
        self._time: Floats = np.empty((num_rows, self._width), np.float64)
        self._peak: Ints = np.empty((num_rows, self._width), np.int64)
        self._time[: n + 1], self._peak[: n + 1] = 0.0, 0
        self._peak_windows = sliding_window_view(self._peak.reshape(-1), self._width)
        self._time_windows = sliding_window_view(self._time.reshape(-1), self._width + 1)
        size = max(_CHUNK, self._terms.cost.shape[1] * self._width)
        self._buffers = np.empty(size, np.int64), np.empty(size, np.int64)
        self._smallest_time: Floats = np.zeros(num_rows, np.float64)
        self._smallest_peak: Ints = np.zeros(num_rows, np.int64)
        self._fill_smallest()
        self._fill()
        self._frontier: list[_Plan] = self._find_frontier()

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget that some schedule fits in, exactly; it may exceed ``max_budget_bytes``."""
        return int(self._smallest_peak[-1])

    def breakpoints(self) -> tuple[tuple[int, float], ...]:
        """Return each (budget_bytes, time_ms) where the least time drops: budgets ascend, times fall.

        Each budget is the exact peak of the plan that reaches the time.
        """
        return tuple((plan.peak, plan.time * self._terms.tick_ms) for plan in self._frontier)

    def time_ms(self, budget_bytes: int) -> float:
        """Return the least time within ``budget_bytes``, or infinity where no schedule fits.

        Raises:
            ValueError: The budget is no whole number, or above the table's ``max_budget_bytes``.
        """
        plan = self._plan_within(budget_bytes)
        return math.inf if plan is None else plan.time * self._terms.tick_ms

    def sequence(self, budget_bytes: int) -> Sequence:
        """Return a sequence that takes ``time_ms(budget_bytes)``, its exact peak within ``budget_bytes``.

        Raises:
            InfeasibleBudgetError: The budget is below ``minimum_bytes``.
            ValueError: The budget is no whole number, or above the table's ``max_budget_bytes``.
        """
        plan = self._plan_within(budget_bytes)
        if plan is None:
            raise InfeasibleBudgetError(budget_bytes, self.minimum_bytes)
        return self._backtrack(plan)

    def _plan_within(self, budget_bytes: int) -> _Plan | None:
        _check_whole("budget_bytes", budget_bytes)
        if budget_bytes > self.max_budget_bytes:
            raise ValueError(
                f"budget_bytes is {budget_bytes}; the table goes up to {self.max_budget_bytes}"
            )
        index = bisect_right(self._frontier, budget_bytes, key=lambda plan: plan.peak)
        return self._frontier[index - 1] if index else None

    def _find_frontier(self) -> list[_Plan]:
        """Return the plans of the whole chain that are faster than every plan of a smaller peak."""
        n = self._terms.num_stages
        plans = [
            self._smallest(0, n - 1),
            *(self._entry(0, n - 1, slot) for slot in range(self._width)),
        ]
        frontier: list[_Plan] = []
        for plan in plans:
            if plan.peak <= self.max_budget_bytes and plan.time < (
                frontier[-1].time if frontier else math.inf
            ):
                frontier.append(plan)
        if len(frontier) > 1 and frontier[0].peak == frontier[1].peak:
            del frontier[0]
        return frontier

    # --- filling ---

    def _row(self, s: Any, t: Any) -> Any:
        """Return the row of subchain ``s``..``t``, numbers or arrays of them; ``t`` is at least ``s`` - 1."""
        return self._row_of_length[t - s + 1] + s

    def _fill(self) -> None:
        """Fill every entry, from short subchains to the whole: all of a length beside each other, in chunks."""
        n = self._terms.num_stages
        # The two parts of a redo: Opt(s, j-1) with the forward to j, and Opt(j, t) with x_j counted.
        before = _Parts(self._num_blocks, n * (n + 1) // 2)
        beside = _Parts(self._num_blocks, n * (n + 1) // 2)
        unlimited: Floats = np.zeros(len(self._time), np.float64)  # the least time without a budget
        fastest_from: Ints = np.zeros(
            len(self._time), np.int64
        )  # the first slot with a plan that takes that
        for more in range(n):  # stages after the first
            for s in _chunks(n - more, self._terms.cost.shape[1] * self._width):
                self._keep(s, s + more, self._rows(s, more), unlimited, fastest_from)
            for s in _chunks(n - more, self._width + more * self._num_blocks):
                rows = self._rows(s, more)
                slots = self._useful_slots(rows, fastest_from)
                if more:
                    self._redo(s, s + more, rows, unlimited, before, beside, slots)
                self._carry_on(rows, slots)
                charge, all_slots = self._terms.input[s], slice(0, self._width)
                charged = self._charged(
                    self._row(s, s + more), charge, charge // self.unit_bytes, all_slots
                )
                beside.enter(_place_beside(s, s + more), charged)
                rerun = self._terms.rerun[s, s + more]
                before.enter(self._place_before(s, s + more), self._time[rows] + rerun[:, None])

    def _rows(self, s: Ints, more: int) -> slice:
        """Return the rows of consecutive subchains of one length."""
        return slice(self._row(s[0], s[0] + more), self._row(s[-1], s[-1] + more) + 1)

    def _place_before(self, s: Ints, t: Ints) -> Ints:
        """Return the places where those of one ``s`` lie side by side."""
        return s * self._terms.num_stages - s * (s + 1) // 2 + t

    def _useful_slots(self, rows: slice, fastest_from: Ints) -> slice:
        """Return whole blocks of slots; before them no plan of the rows fits, after them none is faster."""
        last = min(int(fastest_from[rows].max()), self._width - 1)
        first = min(int(self._slot_of(self._smallest_peak[rows]).min()), last)
        return slice(first // _BLOCK * _BLOCK, (last // _BLOCK + 1) * _BLOCK)

    def _keep(self, s: Ints, t: Ints, rows: slice, unlimited: Floats, fastest_from: Ints) -> None:
        """Enter the best plans of subchains ``s``..``t`` whose first step keeps a span for good.

        Entered too are the subchains' least times without a budget, and the first slots with a plan that takes
        no more.
        """
        terms = self._terms
        cost = np.where(terms.last[s] <= t[:, None], terms.cost[s], np.inf)
        rest = self._row(np.minimum(terms.last[s], t[:, None]) + 1, t[:, None])
        saved = terms.saved[s]
        least = np.maximum(
            terms.forward_peak[s] + terms.at_rest[t][:, None], terms.backward_peak[s]
        )
        fastest = cost + unlimited[rest]
        unlimited[rows] = fastest.min(axis=1)
        enough = np.maximum(saved + self._peak[rest, -1], least)
        enough[(fastest > unlimited[rows][:, None]) | (self._time[rest, -1] > unlimited[rest])] = (
            _MUCH
        )
        fastest_from[rows] = self._slot_of(enough.min(axis=1))
        slots = self._useful_slots(rows, fastest_from)
        first = np.maximum(self._slot_of(least), saved // self.unit_bytes)
        time = self._charged(rest.ravel(), saved.ravel(), first.ravel(), slots)
        time += cost.reshape(-1, 1)
        width = slots.stop - slots.start
        time = time.reshape(*cost.shape, width)
        best = np.min(time, axis=1, out=self._time[rows, slots])
        self._time[rows, : slots.start], self._time[rows, slots.stop :] = np.inf, best[:, -1:]
        option, slot = _divided(
            np.flatnonzero(time == np.where(best < np.inf, best, -1.0)[:, None]), width
        )
        slot += slots.start
        peak = self._charged_peak(rest.ravel()[option], saved.ravel()[option], slot)
        np.maximum(peak, least.ravel()[option], out=peak)
        self._peak[rows] = _MUCH
        np.minimum.at(
            self._peak[rows].reshape(-1), option // cost.shape[1] * self._width + slot, peak
        )

    def _redo(
        self,
        s: Ints,
        t: Ints,
        rows: slice,
        unlimited: Floats,
        before: _Parts,
        beside: _Parts,
        slots: slice,
    ) -> None:
        """Enter the plans of subchains ``s``..``t`` that keep a boundary ``j`` for a redo, where they are better."""
        terms = self._terms
        blocks = slice(slots.start // _BLOCK, slots.stop // _BLOCK)
        num_blocks, last_slots = (
            blocks.stop - blocks.start,
            self._slots[_BLOCK - 1 :: _BLOCK][blocks],
        )
        j = s[:, None] + np.arange(1, t[0] - s[0] + 1)
        left, right = self._row(s[:, None], j - 1), self._row(j, t[:, None])
        place_before, place_beside = (
            self._place_before(s[:, None], j - 1),
            _place_beside(j, t[:, None]),
        )
        forward_peak = terms.rerun_peak[s[:, None], j - 1] + terms.at_rest[t][:, None]
        first = self._slot_of(forward_peak)
        # A redo is at its fastest at a block's end: it wins nowhere in the block unless it is there as fast as
        # the best is at the end of the block before.
        ends = before.ends[place_before, blocks]
        ends += beside.ends[place_beside, blocks]
        ends[last_slots < first[..., None]] = np.inf
        best_ends = np.minimum(ends.min(axis=1), self._time[rows, last_slots])
        beaten = np.full_like(best_ends, _SLOW)
        np.minimum(best_ends[:, :-1], _SLOW, out=beaten[:, 1:])
        # Of each subchain and block, the redos that may win there.
        may_win = np.ascontiguousarray((ends <= beaten[:, None]).swapaxes(1, 2))
        group, column = _divided(np.flatnonzero(may_win), j.shape[1])
        if not group.size:
            return
        subchain, block = _divided(group, num_blocks)
        block += blocks.start
        pair = subchain * j.shape[1] + column
        begin = block * _BLOCK
        left, right, j, first = (
            left.ravel()[pair],
            right.ravel()[pair],
            j.ravel()[pair],
            first.ravel()[pair],
        )
        redo = before.of_block(block, place_before.ravel()[pair])
        redo += beside.of_block(block, place_beside.ravel()[pair])
        late = np.flatnonzero(first > begin)
        redo[late] = np.where(
            self._slots[:_BLOCK] < (first - begin)[late, None], np.inf, redo[late]
        )
        changes = np.flatnonzero(np.diff(group, prepend=-1))
        best = np.minimum.reduceat(redo, changes, axis=0)
        # Only where a redo is as fast as the keeps do peaks matter: the least of the tied redos.
        place = subchain * self._num_blocks + block
        place_of = place[changes]
        time = self._time[rows].reshape(-1, _BLOCK)
        peak = self._peak[rows].reshape(-1, _BLOCK)
        kept = time[place_of]
        wins = (best <= kept) & (best < np.inf) & (kept > unlimited[rows][subchain[changes], None])
        counts = np.diff(changes, append=group.size)
        row, column = _divided(
            np.flatnonzero(redo == np.repeat(np.where(wins, best, -1.0), counts, axis=0)), _BLOCK
        )
        slot = begin[row] + column
        tied_peak = self._charged_peak(right[row], terms.input[j[row]], slot)
        np.maximum(tied_peak, self._peak[left[row], slot], out=tied_peak)
        np.maximum(tied_peak, forward_peak.ravel()[pair[row]], out=tied_peak)
        peak[place_of] = np.where(wins & (best < kept), _MUCH, peak[place_of])
        time[place_of] = np.where(wins, best, kept)
        np.minimum.at(peak.reshape(-1), place[row] * _BLOCK + column, tied_peak)

    def _carry_on(self, rows: slice, slots: slice) -> None:
        """Replace each peak by that of the first slot as fast, whose plan has the smaller peak."""
        time, peak = self._time[rows, slots], self._peak[rows, slots]
        self._peak[rows, : slots.start] = 0  # of what is not feasible
        peak[:, 0][time[:, 0] == np.inf] = 0
        drops = np.zeros(time.shape, np.int64)
        np.multiply(time[:, 1:] < time[:, :-1], self._slots[1 : time.shape[1]], out=drops[:, 1:])
        np.maximum.accumulate(drops, axis=1, out=drops)
        peak[:] = np.take_along_axis(peak, drops, axis=1)
        self._peak[rows, slots.stop :] = peak[:, -1:]

    def _charged(self, rows: Ints, charge: Ints, first: Ints, slots: slice) -> Floats:
        """Return the times of rows at some slots with a charge of bytes held beside each.

        They are infinite before the first slot that is given for each. From there on the entry of a slot is the
        last one whose peak and charge fit in the slot's budget: the one that is as many units earlier as the
        charge has whole ones, or the one before that.
        """
        start = rows * self._width - np.minimum(charge // self.unit_bytes, self._width - 1)
        shape = (len(rows), slots.stop - slots.start)
        spare, chosen = (buffer[: math.prod(shape)].reshape(shape) for buffer in self._buffers)
        np.subtract(self._budgets[slots], charge[:, None], out=spare)
        spare -= self._peak_windows[start, slots]
        spare >>= 63  # -1 for the entry before
        times = self._time_windows[start - 1, slots.start : slots.stop + 1].view(np.int64)
        # Chosen by bits: a branch for each would mostly be mispredicted.
        np.bitwise_xor(times[:, 1:], times[:, :-1], out=chosen)
        chosen &= spare
        chosen ^= times[:, 1:]
        charged = chosen.view(np.float64)
        np.copyto(charged, np.inf, where=self._slots[slots] < first[:, None])
        return charged

    def _charged_peak(self, rows: Ints, charge: Ints, slot: Ints) -> Ints:
        """Return the peaks that belong to entries of ``_charged``, the charge included."""
        peaks = self._peak.reshape(-1)
        source = rows * self._width + slot - charge // self.unit_bytes
        return peaks[source - (peaks[source] + charge > self._budgets[slot])] + charge

    def _slot_of(self, size_bytes: Ints) -> Ints:
        """Return the first slots whose budget holds the sizes; the table's width where there is none."""
        size_bytes = np.minimum(size_bytes, self.max_budget_bytes + 1)
        return self._width - 1 - (self.max_budget_bytes - size_bytes) // self.unit_bytes

    def _fill_smallest(self) -> None:
        """Find the smallest peak of every subchain, exactly in bytes, and the time of a plan that has it."""
        terms, n = self._terms, self._terms.num_stages
        time, peak = self._smallest_time, self._smallest_peak
        for more in range(n):
            s = np.arange(n - more)
            t = s + more
            rest = self._row(np.minimum(terms.last[s], t[:, None]) + 1, t[:, None])
            keep_time = np.where(terms.last[s] <= t[:, None], terms.cost[s], np.inf) + time[rest]
            keep_peak = np.maximum(
                terms.forward_peak[s] + terms.at_rest[t][:, None], terms.backward_peak[s]
            )
            np.maximum(keep_peak, terms.saved[s] + peak[rest], out=keep_peak)
            keep_peak[keep_time == np.inf] = _MUCH
            j = s[:, None] + np.arange(1, more + 1)
            left, right = self._row(s[:, None], j - 1), self._row(j, t[:, None])
            redo_time = terms.rerun[s[:, None], j - 1] + time[right] + time[left]
            redo_peak = np.maximum(terms.input[j] + peak[right], peak[left])
            np.maximum(
                redo_peak,
                terms.rerun_peak[s[:, None], j - 1] + terms.at_rest[t][:, None],
                out=redo_peak,
            )
            times, peaks = np.hstack((keep_time, redo_time)), np.hstack((keep_peak, redo_peak))
            least = peaks.min(axis=1)
            rows = self._row(s, t)
            peak[rows], time[rows] = (
                least,
                np.where(peaks == least[:, None], times, np.inf).min(axis=1),
            )

    # --- backtracking ---

    def _backtrack(self, plan: _Plan) -> Sequence:
        """Return the steps of a plan of the whole chain."""
        steps: list[Step] = []
        todo: list[Step | tuple[int, int, _Plan]] = [(0, self._terms.num_stages - 1, plan)]
        while todo:
            item = todo.pop()
            if isinstance(item, tuple):
                todo.extend(reversed(self._expand(*item)))
            else:
                steps.append(item)
        return Sequence(tuple(steps))

    def _expand(self, s: int, t: int, plan: _Plan) -> list[Step | tuple[int, int, _Plan]]:
        """Return the steps and smaller plans that a plan of subchain ``s``..``t`` is made of, found anew."""
        terms = self._terms
        for e, options in terms.spans[s]:
            if e > t:
                break
            for index, option in enumerate(options):
                rest = self._within(e + 1, t, plan.slot, option.saved_bytes)
                peak = max(
                    option.saved_bytes + rest.peak,
                    option.forward_peak_bytes + int(terms.at_rest[t]),
                    option.backward_peak_bytes + terms.left_behind[e],
                )
                if terms.cost_of(option) + rest.time == plan.time and peak == plan.peak:
                    after: list[Step | tuple[int, int, _Plan]] = [(e + 1, t, rest)] if e < t else []
                    return [ForwardKeep(s, e, index), *after, Backward(s, e, index)]
        for j in range(s + 1, t + 1):
            right = self._within(j, t, plan.slot, int(terms.input[j]))
            left = self._within(s, j - 1, plan.slot, 0)
            peak = max(
                int(terms.input[j]) + right.peak,
                left.peak,
                int(terms.rerun_peak[s, j - 1] + terms.at_rest[t]),
            )
            if (
                float(terms.rerun[s, j - 1]) + right.time + left.time == plan.time
                and peak == plan.peak
            ):
                return [*map(ForwardOnly, range(s, j)), (j, t, right), (s, j - 1, left)]
        raise AssertionError(
            f"no decision gives the entry of stages {s} to {t} at slot {plan.slot}"
        )

    def _within(self, s: int, t: int, slot: int, charge: int) -> _Plan:
        """Return the plan of a subchain that fits in a slot's budget with ``charge`` bytes held beside it."""
        if s > t:
            return _Plan(time=0.0, peak=0, slot=slot)
        if slot == _SMALLEST:
            return self._smallest(s, t)
        whole, rest = divmod(charge, self.unit_bytes)
        slot -= whole
        if slot >= 0 and self._peak[self._row(s, t), slot] > self._budgets[slot] - rest:
            slot -= 1
        return self._entry(s, t, slot) if slot >= 0 else _Plan(time=math.inf, peak=0, slot=0)

    def _entry(self, s: int, t: int, slot: int) -> _Plan:
        """Return the entry of a slot, from the first slot that holds the same."""
        row = self._row(s, t)
        time = float(self._time[row, slot])
        first = slot + 1 - int(np.searchsorted(self._time[row, slot::-1], time, side="right"))
        return _Plan(time=time, peak=int(self._peak[row, slot]), slot=first)

    def _smallest(self, s: int, t: int) -> _Plan:
        row = self._row(s, t)
        return _Plan(
            time=float(self._smallest_time[row]), peak=int(self._smallest_peak[row]), slot=_SMALLEST
        )


def _divided(numbers: Ints, by: int) -> tuple[Ints, Ints]:
    """Return quotients and remainders; ``np.divmod`` takes several times as long."""
    quotients = numbers // by
    return quotients, numbers - quotients * by


def _place_beside(s: Ints, t: Ints) -> Ints:
    """Return the places where those of one ``t`` lie side by side."""
    return t * (t + 1) // 2 + s


def _chunks(count: int, size: int) -> Iterator[Ints]:
    """Yield the numbers below ``count`` in runs, each ``_CHUNK`` or less if one number has that ``size``."""
    step = max(1, _CHUNK // size)
    for begin in range(0, count, step):
        yield np.arange(begin, min(begin + step, count))
