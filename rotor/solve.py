"""Rotor: the fastest persistent schedule of a chain for every memory budget at once.

Also known as optimal checkpointing for heterogeneous chains. A dynamic program over (first stage,
last stage, memory): Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", 2019. On a uniform
chain it gives the binomial schedules of Griewank and Walther's revolve, 2000.

Optimal among *persistent* schedules: a kept boundary stays until the backward that it was kept for.
On some heterogeneous chains, a schedule is faster that drops a kept boundary early and makes it
again later. Such schedules are not searched for: the best of all is NP-hard to find. Nor are steps
overlapped, or values moved to another memory.

Symbols, as in the papers:

    s, t         first and last stage of a subchain, beside whose input x_s memory is counted
    m            bytes of memory; Opt(s, t, m) is the least time of subchain s..t within m
    x_s, d_s     boundary that enters stage s; gradient of the boundary that leaves it
    j            the boundary that is kept to recompute from

    Opt(s, t, m) = 0 if s > t, and otherwise the minimum of
      keep        f_s + b_s + Opt(s+1, t, m - saved_s)
                  if keep_peak_s + d_t <= m and backward_peak_s <= m
      recompute   f_s + .. + f_(j-1) + Opt(j, t, m - x_j) + Opt(s, j-1, m)  over s < j <= t
                  if forward_peak_k + (x_k if k > s) + d_t <= m for each k from s to j-1

**Rounding.** Sizes are never rounded. The budgets of the table are ``max_budget_bytes`` and those
that lie whole units below it: its *slots*. Each entry holds the time and the exact peak of its
plan, and is used wherever that peak fits. So every plan fits in bytes, and a small size costs no
slot. A chain whose subchains have at most one useful plan in each slot is solved exactly. That
holds for any chain if the unit is 1 byte, and for small storages beside huge ones. Time is lost
only where a subchain has several useful plans within one slot. The fastest of them stays, so the
loss is less than one unit for each storage held at a time, and one for the query. The bound: the
time found at budget m is at most the optimum at m - num_stages * unit, and at ``max_budget_bytes``
itself one unit closer. Beside the table, the plan of the smallest peak is found exactly.

Times are rounded to about 15 digits of the chain's largest plan, so that sums of them are exact in
any order, and plans of equal time tie. Ties go to the smaller peak, then keep before recompute,
then the earlier boundary.

Memory: n^2 / 2 * num_slots entries of 34 bytes. Time: n^3 / 6 * num_slots steps of numpy.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rotor.chain import Chain, Sequence, Step

_Array = npt.NDArray[Any]

# In place of a slot: the subchain's plan of the smallest peak, whatever its time.
_MIN_PEAK = -1
_INF_BYTES = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan of the whole chain: its exact peak, its ticks, and its slot in the table."""

    peak: int
    time: float
    slot: int


class _Plans(NamedTuple):
    """Ticks and exact peaks of plans of subchains."""

    time: _Array
    peak: _Array


class Table:
    """The least time of a chain for every budget, and sequences that reach it.

    What it holds is exact or bounded as stated at the head of the module.
    """

    def __init__(self, chain: Chain, max_budget_bytes: int, num_slots: int = 1000) -> None:
        """Find the smallest peaks. The rest of the table is filled when it is first asked for.

        Args:
            chain: The stages.
            max_budget_bytes: The largest budget that will be asked for.
            num_slots: Resolution: budgets are ``max_budget_bytes / num_slots`` apart, rounded up to
                whole bytes.
        """
        self.chain, self.max_budget_bytes = chain, max_budget_bytes
        self.unit_bytes: int = max(1, -(-max_budget_bytes // num_slots))
        n, width = len(chain), -(-max_budget_bytes // self.unit_bytes) + 1
        self._slots = np.arange(width)
        self._budgets = max_budget_bytes - self.unit_bytes * self._slots[::-1]
        self._set_terms()
        # At [first stage, number of stages, slot]: ticks, exact peak, and the boundary j to
        # recompute from, or the first stage itself if it is kept. Subchains of 0 stages take 0.
        shape = n + 1, n + 1, width
        self._best = _Plans(np.zeros(shape, np.float64), np.zeros(shape, np.int64))
        self._choice = np.zeros(shape, np.int16)
        # At [last stage, first stage, slot]: the same with the subchain's input counted.
        self._with_input = _Plans(np.zeros(shape, np.float64), np.zeros(shape, np.int64))
        # Of the plan of the smallest peak, at [first stage, number of stages].
        self._least = _Plans(np.zeros(shape[:2], np.float64), np.zeros(shape[:2], np.int64))
        self._least_choice = np.zeros(shape[:2], np.int16)
        for length in range(1, n + 1):
            self._fill_min_peak(length)

    def _set_terms(self) -> None:
        """Lay out the numbers of the recurrence, with times in whole ticks."""
        stages = self.chain
        # No plan runs a stage forward more than num_stages times.
        bound_ms = sum(len(stages) * stage.forward_ms + stage.backward_ms for stage in stages)
        self._tick_ms = math.ldexp(1.0, max(math.frexp(bound_ms)[1] - 52, -1022))
        forward = [float(round(stage.forward_ms / self._tick_ms)) for stage in stages]
        self._cost = [
            ticks + round(stage.backward_ms / self._tick_ms)
            for ticks, stage in zip(forward, stages, strict=True)
        ]
        self._input = np.array([stage.input_bytes for stage in stages], np.int64)
        peaks = np.array([stage.forward_peak_bytes for stage in stages], np.int64)
        # At [s] and [j - s - 1], of running stages s to j - 1 forward-only: ticks, peak beside x_s.
        self._reruns: list[_Plans] = []
        for s in range(len(stages)):
            peak = np.maximum.accumulate(np.append(peaks[s], (peaks + self._input)[s + 1 :]))
            self._reruns.append(_Plans(np.cumsum(forward[s:]), peak))

    # --- filling ---

    def _beside(self, first: int, length: int, charge: int) -> _Array:
        """Return for each slot that of a subchain's plan with ``charge`` bytes held beside it.

        The last entry whose peak and charge fit into a slot's budget is the one as many slots
        earlier as the charge has whole units, or the one before; below 0 if there is none.
        """
        slot = self._slots - charge // self.unit_bytes
        peak = self._best.peak[first, length, np.maximum(slot, 0)]
        return slot - (peak > self._budgets - charge)

    def _charged(self, first: int, length: int, charge: int) -> tuple[_Array, _Array]:
        """Return ticks and peaks of a subchain by slot, with ``charge`` bytes held beside it."""
        slot = self._beside(first, length, charge)
        (time, peak), at = self._best, (first, length, np.maximum(slot, 0))
        return np.where(slot < 0, np.inf, time[at]), charge + peak[at]

    def _fill(self, s: int, length: int) -> None:
        """Enter the best plans of a subchain: the fastest of a slot, of ties the smallest peak."""
        stage, t = self.chain[s], s + length - 1
        (time, peak), (charged_time, charged_peak) = self._best, self._with_input
        kept_time, kept_peak = self._charged(s + 1, length - 1, stage.saved_bytes)
        times = np.empty((length, len(self._slots)), np.float64)
        peaks = np.empty((length, len(self._slots)), np.int64)
        times[0] = self._cost[s] + kept_time
        peaks[0] = np.maximum(kept_peak, self._keep_peak(s, length))
        if length > 1:  # at [boundary, slot]
            left, right = (s, slice(1, length)), (t, slice(s + 1, t + 1))
            np.add(time[left], charged_time[right], out=times[1:])
            times[1:] += self._reruns[s].time[: length - 1, None]
            np.maximum(peak[left], charged_peak[right], out=peaks[1:])
            np.maximum(peaks[1:], self._forward_peak(s, length)[:, None], out=peaks[1:])
        times[peaks > self._budgets] = np.inf
        best = times.min(axis=0)
        which = np.where(times == best, peaks, _INF_BYTES).argmin(axis=0)
        # The first slot that is as fast has the plan of the smaller peak.
        is_faster = np.concatenate(([True], best[1:] < best[:-1]))
        source = np.maximum.accumulate(np.where(is_faster, self._slots, 0))
        time[s, length] = best[source]
        least = np.where(best < np.inf, peaks[which, self._slots], 0)
        peak[s, length] = least[source]
        self._choice[s, length] = (s + which)[source]
        charged = self._charged(s, length, stage.input_bytes)
        charged_time[t, s], charged_peak[t, s] = charged

    def _keep_peak(self, s: int, length: int) -> int:
        """Return the peak of stage ``s``, kept, beside what else it takes."""
        stage, last = self.chain[s], self.chain[s + length - 1]
        return max(stage.keep_peak_bytes + last.output_gradient_bytes, stage.backward_peak_bytes)

    def _forward_peak(self, s: int, length: int) -> _Array:
        """Return the peaks of the forwards from ``s`` to each later stage of a subchain."""
        gradient_bytes = self.chain[s + length - 1].output_gradient_bytes
        return self._reruns[s].peak[: length - 1] + gradient_bytes

    def _fill_min_peak(self, length: int) -> None:
        """Enter the smallest peaks of all subchains of one length; of such plans the fastest."""
        time, peak = self._least
        first = np.arange(len(self.chain) - length + 1)
        s, j = first[:, None], first[:, None] + np.arange(1, length)  # at [subchain, boundary]
        right, left = (j, s + length - j), (s, j - s)
        peaks = np.empty((len(first), length), np.int64)
        times = np.empty(peaks.shape, np.float64)
        saved = np.array([self.chain[each].saved_bytes for each in first])
        own = [self._keep_peak(each, length) for each in first.tolist()]
        peaks[:, 0] = np.maximum(saved + peak[first + 1, length - 1], own)
        times[:, 0] = np.array(self._cost)[first] + time[first + 1, length - 1]
        np.maximum(self._input[j] + peak[right], peak[left], out=peaks[:, 1:])
        forward = [self._forward_peak(each, length) for each in first.tolist()]
        np.maximum(peaks[:, 1:], forward, out=peaks[:, 1:])
        times[:, 1:] = [self._reruns[each].time[: length - 1] for each in first]
        times[:, 1:] += time[right] + time[left]
        least = peaks.min(axis=1)
        best = np.where(peaks == least[:, None], times, np.inf).argmin(axis=1)
        peak[first, length], time[first, length] = least, times[first, best]
        self._least_choice[first, length] = first + best

    # --- answers ---

    @property
    def minimum_bytes(self) -> int:
        """The exact smallest budget of any schedule; it may exceed ``max_budget_bytes``."""
        return int(self._least.peak[0, len(self.chain)])

    def breakpoints(self) -> tuple[tuple[int, float], ...]:
        """Return (budget_bytes, time_ms) wherever the least time drops: budgets grow, times fall.

        Each budget is the exact peak of the plan that reaches the time.
        """
        return tuple((plan.peak, plan.time * self._tick_ms) for plan in self._frontier)

    def time_ms(self, budget_bytes: int) -> float:
        """Return the least time within ``budget_bytes``, or infinity where no schedule fits."""
        plan = self._plan_within(budget_bytes)
        return math.inf if plan is None else plan.time * self._tick_ms

    def sequence(self, budget_bytes: int) -> Sequence:
        """Return a sequence of time ``time_ms(budget_bytes)``; its exact peak is within the budget.

        The budget is at least ``minimum_bytes``.
        """
        plan = self._plan_within(budget_bytes)
        assert plan is not None
        return self._backtrack(plan.slot)

    def smallest(self) -> Sequence:
        """Return a sequence of the smallest peak, whatever its time, without filling the table."""
        return self._backtrack(_MIN_PEAK)

    def _backtrack(self, slot: int) -> Sequence:
        steps: list[Step] = []
        todo: list[Step | tuple[int, int, int]] = [(0, len(self.chain), slot)]
        while todo:
            item = todo.pop()
            if isinstance(item, Step):
                steps.append(item)
            else:
                todo.extend(reversed(self._expand(*item)))
        return tuple(steps)

    def _plan_within(self, budget_bytes: int) -> _Plan | None:
        assert budget_bytes <= self.max_budget_bytes
        index = bisect_right(self._frontier, budget_bytes, key=lambda plan: plan.peak)
        return self._frontier[index - 1] if index else None

    @cached_property
    def _frontier(self) -> list[_Plan]:
        """The plans of the whole chain that are faster than every plan of a smaller peak."""
        n = len(self.chain)
        for length in range(1, n + 1):
            for s in range(n - length + 1):
                self._fill(s, length)
        plans = [_Plan(self.minimum_bytes, float(self._least.time[0, n]), _MIN_PEAK)]
        plans += [
            _Plan(int(self._best.peak[0, n, slot]), float(self._best.time[0, n, slot]), slot)
            for slot in self._slots.tolist()
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

    def _expand(self, s: int, length: int, slot: int) -> list[Step | tuple[int, int, int]]:
        """Return the steps and smaller plans of which a plan of a subchain consists."""
        if not length:
            return []
        if slot == _MIN_PEAK:
            j = int(self._least_choice[s, length])
        else:  # the plan of the first slot that is as fast
            time = self._best.time[s, length]
            slot = len(time) - int(np.searchsorted(time[::-1], time[slot], side="right"))
            j = int(self._choice[s, length, slot])

        def beside(first: int, rest: int, charge: int) -> tuple[int, int, int]:
            is_slot = slot != _MIN_PEAK
            return first, rest, int(self._beside(first, rest, charge)[slot]) if is_slot else slot

        if j == s:
            rest = beside(s + 1, length - 1, self.chain[s].saved_bytes)
            return [Step("K", s), rest, Step("B", s)]
        right = beside(j, s + length - j, int(self._input[j]))
        return [*(Step("F", each) for each in range(s, j)), right, (s, j - s, slot)]
