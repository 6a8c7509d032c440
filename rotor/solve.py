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

Cost: n^2 / 2 * num_slots entries of 32 bytes; time n^3 / 6 * num_slots for the redos, n^2 / 2 * options *
num_slots for the keeps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral

import numpy as np
import numpy.typing as npt

from rotor.chain import Chain, Option, check_size
from rotor.sequence import Backward, ForwardKeep, ForwardOnly, Sequence, Step

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_SMALLEST = -1  # stands for a slot: the subchain's plan of the smallest peak, whatever its time
_MUCH = np.iinfo(np.int64).max


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
        self.input: list[int] = [stage.input_bytes for stage in stages]
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
            max(o.forward_ms + o.backward_ms for _, options in at for o in options) for at in self.spans
        ]
        # No plan runs a stage forward more than num_stages times, so 2**52 ticks are enough for any.
        bound_ms = sum(slowest) + self.num_stages * sum(stage.forward_ms for stage in stages)
        self.tick_ms: float = math.ldexp(1.0, max(math.frexp(bound_ms)[1] - 52, -1022))
        self.forward: list[float] = [self.ticks(stage.forward_ms) for stage in stages]
        # Row s: ticks, and peak beside x_s, of running stages s..j-1 forward-only; column j - s - 1.
        self.rerun: list[Floats] = []
        self.rerun_peak: list[Ints] = []
        for s in range(self.num_stages):
            peaks = [
                stages[k].forward_peak_bytes + (self.input[k] if k > s else 0)
                for k in range(s, self.num_stages)
            ]
            self.rerun.append(np.array(list(accumulate(self.forward[s:])), np.float64))
            self.rerun_peak.append(np.array(list(accumulate(peaks, max)), np.int64))

    def ticks(self, time_ms: float) -> float:
        """Return a time as a whole number of ticks."""
        return float(round(time_ms / self.tick_ms))

    def cost(self, option: Option) -> float:
        """Return the time of an option's forward and backward in ticks."""
        return self.ticks(option.forward_ms + option.backward_ms)


class Table:
    """The least time of a chain for every budget, and sequences that reach it; made by ``solve_table``."""

    def __init__(self, chain: Chain, max_budget_bytes: int, num_slots: int) -> None:
        """Fill the table; use ``solve_table``, which checks the arguments."""
        self.chain = chain
        self.max_budget_bytes = max_budget_bytes
        self.unit_bytes: int = max(1, -(-max_budget_bytes // num_slots))
        self._terms = _Terms(chain)
        self._width: int = -(-max_budget_bytes // self.unit_bytes) + 1
        self._budgets: Ints = max_budget_bytes - self.unit_bytes * np.arange(
            self._width - 1, -1, -1, dtype=np.int64
        )
        n = self._terms.num_stages
        # Entries [s][t - s, slot].
        self._time: list[Floats] = [np.empty((n - s, self._width), np.float64) for s in range(n)]
        self._peak: list[Ints] = [np.empty((n - s, self._width), np.int64) for s in range(n)]
        self._smallest_time: Floats = np.zeros((n, n), np.float64)
        self._smallest_peak: Ints = np.zeros((n, n), np.int64)
        self._fill()
        self._fill_smallest()
        self._frontier: list[_Plan] = self._find_frontier()

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget that some schedule fits in, exactly; it may exceed ``max_budget_bytes``."""
        return int(self._smallest_peak[0, -1])

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
            raise ValueError(f"budget_bytes is {budget_bytes}; the table goes up to {self.max_budget_bytes}")
        index = bisect_right(self._frontier, budget_bytes, key=lambda plan: plan.peak)
        return self._frontier[index - 1] if index else None

    def _find_frontier(self) -> list[_Plan]:
        """Return the plans of the whole chain that are faster than every plan of a smaller peak."""
        n = self._terms.num_stages
        plans = [self._smallest(0, n - 1), *(self._entry(0, n - 1, slot) for slot in range(self._width))]
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

    def _fill(self) -> None:
        """Fill every entry: from short subchains at the chain's end to the whole."""
        terms, n, width = self._terms, self._terms.num_stages, self._width
        # Opt(j, t) with x_j counted, at [t][j]: what a redo adds to Opt(s, j-1) of the same slot.
        beside_time: list[Floats] = [np.empty((t + 1, width), np.float64) for t in range(n)]
        beside_peak: list[Ints] = [np.empty((t + 1, width), np.int64) for t in range(n)]
        beside_first: Ints = np.zeros((n, n), np.int64)  # the first feasible slot
        unlimited: Floats = np.full((n, n), np.inf)  # the least time without a budget
        scratch: Floats = np.empty(n * width, np.float64)
        slots = np.arange(width)
        for s in range(n - 1, -1, -1):
            self._keep(s, unlimited)
            rerun_time: Floats = np.empty((n, width), np.float64)  # row j-1: Opt(s, j-1) and the forward to j
            first: Ints = np.zeros(n, np.int64)
            for t in range(s, n):
                time, peak = self._time[s][t - s], self._peak[s][t - s]
                js, upto = slice(s + 1, t + 1), slice(s, t)
                # The slots where a redo can win: from the first where one fits to where keeping all does.
                start = np.maximum(first[upto], beside_first[t, js])
                forward_peak = terms.rerun_peak[s][: t - s] + terms.at_rest[t]
                forward_slot = self._slot_of(forward_peak)
                high = width - int(np.searchsorted(time[::-1], unlimited[s, t], side="right"))
                low = min(int(np.maximum(start, forward_slot).min(initial=width)), high)
                if low < high:
                    shape = (t - s, high - low)
                    redo = np.add(
                        rerun_time[upto, low:high],
                        beside_time[t][js, low:high],
                        out=scratch[: shape[0] * shape[1]].reshape(shape),
                    )
                    for row in np.flatnonzero(forward_slot > np.maximum(start, low)):
                        redo[row, : forward_slot[row] - low] = np.inf
                    best = redo.min(axis=0)
                    # Only where a redo is as fast as the keeps do peaks matter: the least of the tied redos.
                    wins = np.flatnonzero(best <= time[low:high])
                    if wins.size:
                        low, high, won = low + wins[0], low + wins[-1] + 1, slice(wins[0], wins[-1] + 1)
                        row, column = np.divmod(np.flatnonzero(redo[:, won] == best[won]), high - low)
                        tied_peak = np.maximum(
                            self._peak[s][row, low + column], beside_peak[t][s + 1 + row, low + column]
                        )
                        best_peak = np.full(high - low, _MUCH)
                        np.minimum.at(best_peak, column, np.maximum(tied_peak, forward_peak[row]))
                        _take_better(time[low:high], peak[low:high], best[won], best_peak)
                # A plan of an earlier slot that is as fast has the smaller peak: carry it on.
                drops = np.where(time[1:] < time[:-1], slots[1:], 0)
                peak[1:] = peak[np.maximum.accumulate(drops)]
                first[t] = np.searchsorted(-time, -math.inf, side="right")
                np.add(time, terms.rerun[s][t - s], out=rerun_time[t])
                beside = self._charged(time, peak, terms.input[s])
                beside_time[t][s], beside_peak[t][s] = beside
                beside_first[t, s] = np.searchsorted(-beside[0], -math.inf, side="right")

    def _keep(self, s: int, unlimited: Floats) -> None:
        """Enter the plans of every subchain from ``s`` whose first step keeps a span for good."""
        terms, n = self._terms, self._terms.num_stages
        self._time[s][:] = np.inf
        self._peak[s][:] = 0
        for e, options in terms.spans[s]:
            for option in options:
                cost = terms.cost(option)
                least = np.maximum(
                    option.forward_peak_bytes + terms.at_rest[e:],
                    option.backward_peak_bytes + terms.left_behind[e],
                )
                least_slot = self._slot_of(least)
                unlimited[s, e] = min(unlimited[s, e], cost)
                alone = (self._time[s][e - s, least_slot[0] :], self._peak[s][e - s, least_slot[0] :])
                _take_better(*alone, np.float64(cost), least[0])
                if e + 1 == n:
                    continue
                np.minimum(unlimited[s, e + 1 :], unlimited[e + 1, e + 1 :] + cost, out=unlimited[s, e + 1 :])
                low = max(int(least_slot[1:].min()), option.saved_bytes // self.unit_bytes)
                if low >= self._width:
                    continue
                time, peak = self._charged(self._time[e + 1], self._peak[e + 1], option.saved_bytes, low)
                time += cost
                np.maximum(peak, least[1:, None], out=peak)
                for row in np.flatnonzero(least_slot[1:] > low):
                    time[row, : least_slot[row + 1] - low] = np.inf
                _take_better(self._time[s][e + 1 - s :, low:], self._peak[s][e + 1 - s :, low:], time, peak)

    def _charged(self, time: Floats, peak: Ints, charge: int, low: int = 0) -> tuple[Floats, Ints]:
        """Return the entries of slots ``low`` and up with ``charge`` bytes held beside them.

        The entry of a slot becomes the last one whose peak and charge fit in the slot's budget.
        """
        whole, rest = divmod(charge, self.unit_bytes)
        skip = max(whole - low, 0)  # slots too small for the charge
        source = slice(low + skip - whole, max(self._width - whole, 0))
        shape = (*time.shape[:-1], self._width - low)
        charged_time: Floats = np.full(shape, np.inf)
        charged_peak: Ints = np.zeros(shape, np.int64)
        if source.start >= source.stop:
            return charged_time, charged_peak
        into_time, into_peak = charged_time[..., skip:], charged_peak[..., skip:]
        if rest == 0:
            into_time[...] = time[..., source]
            np.add(peak[..., source], charge, out=into_peak)
            return charged_time, charged_peak
        fits = peak[..., source] <= self._budgets[source] - rest
        late = 1 if source.start == 0 else 0  # the first slot has none before it
        before = slice(source.start + late - 1, source.stop - 1)
        into_time[..., late:] = time[..., before]
        into_peak[..., late:] = peak[..., before]
        np.copyto(into_time, time[..., source], where=fits)
        np.copyto(into_peak, peak[..., source], where=fits)
        into_peak += charge
        return charged_time, charged_peak

    def _slot_of(self, size_bytes: Ints) -> Ints:
        """Return the first slots whose budget holds the sizes; the table's width where there is none."""
        slot = self._width - 1 - (self.max_budget_bytes - size_bytes) // self.unit_bytes
        return np.minimum(slot, self._width)

    def _fill_smallest(self) -> None:
        """Find the smallest peak of every subchain, exactly in bytes, and the time of a plan that has it."""
        terms, n = self._terms, self._terms.num_stages
        time, peak = self._smallest_time, self._smallest_peak
        peak[:] = _MUCH
        inputs = np.array(terms.input, np.int64)
        for s in range(n - 1, -1, -1):
            for e, options in terms.spans[s]:
                for option in options:
                    cost = terms.cost(option)
                    keep_peak = np.maximum(
                        option.forward_peak_bytes + terms.at_rest[e:],
                        option.backward_peak_bytes + terms.left_behind[e],
                    )
                    keep_time = np.full(n - e, cost)
                    if e + 1 < n:
                        keep_peak[1:] = np.maximum(keep_peak[1:], option.saved_bytes + peak[e + 1, e + 1 :])
                        keep_time[1:] += time[e + 1, e + 1 :]
                    better = keep_peak < peak[s, e:]
                    better |= (keep_peak == peak[s, e:]) & (keep_time < time[s, e:])
                    np.copyto(peak[s, e:], keep_peak, where=better)
                    np.copyto(time[s, e:], keep_time, where=better)
            for t in range(s + 1, n):
                redo_peak = np.maximum(inputs[s + 1 : t + 1] + peak[s + 1 : t + 1, t], peak[s, s:t])
                np.maximum(redo_peak, terms.rerun_peak[s][: t - s] + terms.at_rest[t], out=redo_peak)
                least = redo_peak.min()
                if least <= peak[s, t]:
                    tied = redo_peak == least
                    redo_time = (terms.rerun[s][: t - s] + time[s + 1 : t + 1, t] + time[s, s:t])[tied].min()
                    if (least, redo_time) < (peak[s, t], time[s, t]):
                        peak[s, t], time[s, t] = least, redo_time

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
                if terms.cost(option) + rest.time == plan.time and peak == plan.peak:
                    after: list[Step | tuple[int, int, _Plan]] = [(e + 1, t, rest)] if e < t else []
                    return [ForwardKeep(s, e, index), *after, Backward(s, e, index)]
        for j in range(s + 1, t + 1):
            right = self._within(j, t, plan.slot, terms.input[j])
            left = self._within(s, j - 1, plan.slot, 0)
            peak = max(
                terms.input[j] + right.peak, left.peak, int(terms.rerun_peak[s][j - s - 1] + terms.at_rest[t])
            )
            if float(terms.rerun[s][j - s - 1]) + right.time + left.time == plan.time and peak == plan.peak:
                return [*map(ForwardOnly, range(s, j)), (j, t, right), (s, j - 1, left)]
        raise AssertionError(f"no decision gives the entry of stages {s} to {t} at slot {plan.slot}")

    def _within(self, s: int, t: int, slot: int, charge: int) -> _Plan:
        """Return the plan of a subchain that fits in a slot's budget with ``charge`` bytes held beside it."""
        if s > t:
            return _Plan(time=0.0, peak=0, slot=slot)
        if slot == _SMALLEST:
            return self._smallest(s, t)
        whole, rest = divmod(charge, self.unit_bytes)
        slot -= whole
        if slot >= 0 and self._peak[s][t - s, slot] > self._budgets[slot] - rest:
            slot -= 1
        return self._entry(s, t, slot) if slot >= 0 else _Plan(time=math.inf, peak=0, slot=0)

    def _entry(self, s: int, t: int, slot: int) -> _Plan:
        """Return the entry of a slot, from the first slot that holds the same."""
        time = float(self._time[s][t - s, slot])
        first = slot + 1 - int(np.searchsorted(self._time[s][t - s, slot::-1], time, side="right"))
        return _Plan(time=time, peak=int(self._peak[s][t - s, slot]), slot=first)

    def _smallest(self, s: int, t: int) -> _Plan:
        return _Plan(
            time=float(self._smallest_time[s, t]), peak=int(self._smallest_peak[s, t]), slot=_SMALLEST
        )


def _take_better(
    time: Floats, peak: Ints, other_time: Floats | np.float64, other_peak: Ints | np.int64
) -> None:
    """Replace each entry, in place, by the other where that is faster, or as fast with a smaller peak."""
    better = other_time < time
    better |= (other_time == time) & (other_peak < peak)
    np.copyto(time, other_time, where=better)
    np.copyto(peak, other_peak, where=better)
