"""Rotor: the fastest persistent schedule of a chain for every memory budget at once.

Also known as optimal checkpointing for heterogeneous chains. A dynamic program over (first stage,
last stage, memory): Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", 2019. With several
options for each stage: Rockmate, Zhao et al., ICML 2023. Here also with options for spans of
stages. On a uniform chain of one option it gives the binomial schedules of Griewank and Walther's
revolve, 2000.

Optimal among *persistent* schedules: a kept boundary or option stays until the backward that it was
kept for. On some heterogeneous chains, a schedule is faster that drops a kept boundary early and
makes it again later. Such schedules are not searched for: the best of all is NP-hard to find. Nor
are steps overlapped, or values moved to another memory.

Symbols, as in the papers:

    s, t         first and last stage of a subchain, beside whose input x_s memory is counted
    m            bytes of memory; Opt(s, t, m) is the least time of subchain s..t within m
    x_s, d_s     boundary that enters stage s; gradient of the boundary that leaves it
    g_s          parameter gradients that stay behind after the backward of stage s
    G_t          sum of g_i over i > t: ``left_behind[t]``; d_t + G_t is ``at_rest[t]``
    e, o         last stage and option of a span (s, e)
    j            the boundary that is kept to recompute from

    Opt(t+1, t, m) = 0, and otherwise Opt(s, t, m) = min of
      keep      over e <= t and o:  f_o + b_o + Opt(e+1, t, m - saved_o)
                if forward_peak_o + d_t + G_t <= m and backward_peak_o + G_e <= m
      recompute over s < j <= t:    f_s + .. + f_(j-1) + Opt(j, t, m - x_j) + Opt(s, j-1, m)
                if forward_peak_k + (x_k if k > s) + d_t + G_t <= m for each k from s to j-1

**Rounding.** Sizes are never rounded. The budgets of the table are ``max_budget_bytes`` and those
that lie whole units below it. Each entry holds the time and the exact peak of its plan, and is used
wherever that peak fits. So every plan fits in bytes, and a small size costs no slot. A chain whose
subchains have at most one useful plan in each slot is solved exactly. That holds for any chain if
the unit is 1 byte, and for small storages beside huge ones. Time is lost only where a subchain has
several useful plans within one slot. The fastest of them stays, so the loss is less than one unit
for each storage held at a time, and one for the query. The bound: the time found at budget m is at
most the optimum at m - num_stages * unit, and at ``max_budget_bytes`` itself one unit closer.
Beside the table, the plan of the smallest peak is found exactly.

Times are rounded to about 15 digits of the chain's largest plan, so that sums of them are exact in
any order, and plans of equal time tie. Ties go to the smaller peak, then keep before recompute,
then the shorter span, the lower option, the earlier boundary.

Memory: n^2 / 2 * num_slots entries of 16 bytes each, and 18 more while the table is filled. Time:
n^2 / 2 * options * num_slots for the keeps, and at most n^3 / 6 * num_slots for the recomputations.
Blocks of slots are skipped in which no recomputation can win, in which nothing fits, and after
which nothing gets faster.

The parts: ``terms.py`` has the numbers, ``entries.py`` the arrays, ``fill.py`` fills them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from numbers import Integral

from rotor.chain import Chain, check_size
from rotor.entries import Entries, Entry
from rotor.fill import TableFiller, fill_min_peak
from rotor.sequence import Backward, ForwardKeep, ForwardOnly, Sequence, Step
from rotor.terms import Terms


class InfeasibleBudgetError(ValueError):
    """No persistent schedule fits in the budget.

    Attributes:
        budget_bytes: The budget asked for.
        minimum_bytes: The smallest budget that some schedule fits in, exactly.
    """

    def __init__(self, budget_bytes: int, minimum_bytes: int) -> None:
        """Write both numbers into the message."""
        super().__init__(
            f"budget_bytes is {budget_bytes}; no schedule fits in less than {minimum_bytes} bytes, "
            "so ask for at least that"
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
        num_slots: Number of budgets of the table, at least 1. Time and memory grow in proportion.

    Returns:
        The table. Each of its plans has an exact peak within its budget. For the cost of rounding,
        see the module.

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


class Table:
    """The least time of a chain for every budget, and sequences that reach it.

    ``solve_table`` makes it.
    """

    def __init__(self, chain: Chain, max_budget_bytes: int, num_slots: int) -> None:
        """Fill the table; use ``solve_table``, which checks the arguments."""
        self.chain = chain
        self.max_budget_bytes = max_budget_bytes
        self._terms = Terms(chain)
        self._entries = Entries(self._terms.num_stages, max_budget_bytes, num_slots)
        self.unit_bytes: int = self._entries.unit_bytes
        fill_min_peak(self._terms, self._entries)
        TableFiller(self._terms, self._entries).fill()
        self._frontier: list[Entry] = self._find_frontier()

    @property
    def minimum_bytes(self) -> int:
        """The exact smallest budget of any schedule; it may exceed ``max_budget_bytes``."""
        return self._entries.min_peak_entry(0, self._terms.num_stages - 1).peak

    def breakpoints(self) -> tuple[tuple[int, float], ...]:
        """Return (budget_bytes, time_ms) wherever the least time drops: budgets grow, times fall.

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
        """Return a sequence of time ``time_ms(budget_bytes)``; its exact peak is within the budget.

        Raises:
            InfeasibleBudgetError: The budget is below ``minimum_bytes``.
            ValueError: The budget is no whole number, or above the table's ``max_budget_bytes``.
        """
        plan = self._plan_within(budget_bytes)
        if plan is None:
            raise InfeasibleBudgetError(budget_bytes, self.minimum_bytes)
        return self._backtrack(plan)

    def _plan_within(self, budget_bytes: int) -> Entry | None:
        _check_whole("budget_bytes", budget_bytes)
        if budget_bytes > self.max_budget_bytes:
            raise ValueError(
                f"budget_bytes is {budget_bytes}; the table goes up to {self.max_budget_bytes}"
            )
        index = bisect_right(self._frontier, budget_bytes, key=lambda plan: plan.peak)
        return self._frontier[index - 1] if index else None

    def _find_frontier(self) -> list[Entry]:
        """Return the plans of the whole chain that are faster than every plan of a smaller peak."""
        n = self._terms.num_stages
        entries = self._entries
        plans = [
            entries.min_peak_entry(0, n - 1),
            *(entries.entry(0, n - 1, slot) for slot in range(entries.width)),
        ]
        frontier: list[Entry] = []
        for plan in plans:
            if plan.peak <= self.max_budget_bytes and plan.time < (
                frontier[-1].time if frontier else math.inf
            ):
                frontier.append(plan)
        if len(frontier) > 1 and frontier[0].peak == frontier[1].peak:
            del frontier[0]
        return frontier

    # --- backtracking ---

    def _backtrack(self, plan: Entry) -> Sequence:
        """Return the steps of a plan of the whole chain."""
        steps: list[Step] = []
        todo: list[Step | tuple[int, int, Entry]] = [(0, self._terms.num_stages - 1, plan)]
        while todo:
            item = todo.pop()
            if isinstance(item, tuple):
                todo.extend(reversed(self._expand(*item)))
            else:
                steps.append(item)
        return Sequence(tuple(steps))

    def _expand(self, s: int, t: int, plan: Entry) -> list[Step | tuple[int, int, Entry]]:
        """Return the steps and smaller plans of which a plan of subchain ``s``..``t`` consists.

        Decisions are not stored. The one that gives the entry's time and peak is found again.
        """
        terms = self._terms
        for e, options in terms.spans[s]:
            if e > t:
                break
            for index, option in enumerate(options):
                rest = self._entries.entry_beside(e + 1, t, plan.slot, option.saved_bytes)
                peak = max(
                    option.saved_bytes + rest.peak,
                    option.forward_peak_bytes + int(terms.at_rest[t]),
                    option.backward_peak_bytes + terms.left_behind[e],
                )
                if terms.cost_of(option) + rest.time == plan.time and peak == plan.peak:
                    after: list[Step | tuple[int, int, Entry]] = [(e + 1, t, rest)] if e < t else []
                    return [ForwardKeep(s, e, index), *after, Backward(s, e, index)]
        for j in range(s + 1, t + 1):
            right = self._entries.entry_beside(j, t, plan.slot, int(terms.input[j]))
            left = self._entries.entry_beside(s, j - 1, plan.slot, 0)
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
