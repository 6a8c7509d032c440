"""The perturbations of the local search: ways out of the place where greedy moves have ended.

A round takes the incumbent, perturbs it and repairs it for the budget again. Three kinds take turns
at random:

* **Swap** (the kick of an iterated local search: Lourenco, Martin and Stützle 2003). A few
  recomputations are removed whether they fit or not, and other values are evicted instead.
* **Oscillation** (strategic oscillation: Glover 1977). The incumbent is refined for a larger
  budget, so that values stay live again. It is then tightened budget by budget.
* **Tightening**. The same from the baseline.

In all, the recompute times that rank evictions are multiplied by random factors (noising: Charon
and Hudry 1993), so that other values are evicted first. Refinement and the judgement of the result
use the true times. Random numbers come from a generator with a fixed seed for each budget: a search
is repeatable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rockmate._util import Floats
from rockmate.costs.cost import scaled_recompute_times
from rockmate.planning.candidate import Candidate
from rockmate.planning.live_ranges import LiveRanges
from rockmate.planning.search_problem import SearchProblem

# The mean time of 44 plans of seven models hardly depends on these numbers: it is within
# 0.002 of the baseline's time for ratios of 1.3 or drawn from 1.15 to 1.8, relaxations up to 2.5 or
# 4, noise of 0.5 or 0.8, swaps of up to 4 or 8. Other random numbers make a difference of 0.001.
#
# Largest factor by which a budget is relaxed.
_MAX_RELAXATION = 2.5
# Ratio between neighbouring budgets while tightening.
_TIGHTENING_RATIO = 1.3
# Largest standard deviation of the logarithm of a price's factor.
_PRICE_NOISE = 0.5
# Factor of a price that is paid only where nothing else can be evicted.
_NEVER = 1e9
# Largest number of recomputations that a swap removes.
_MAX_SWAPPED = 4


class Perturbation:
    """Random rounds from one incumbent after the other.

    Args:
        problem: the graph and the refiner of its schedules.
        budget_bytes: the budget of the incumbents, below the baseline's peak.
    """

    def __init__(self, problem: SearchProblem, budget_bytes: int) -> None:
        self._graph = problem.graph
        self._refiner = problem.refiner
        self._costs = problem.costs
        self._baseline = problem.baseline
        self._budget_bytes = budget_bytes
        self._random = np.random.default_rng(0)

    def round(self, incumbent: Candidate) -> tuple[str, Candidate | None]:
        """The kind of perturbation, and another schedule within the budget.

        None if the perturbed schedule cannot be made to fit.
        """
        kind = int(self._random.integers(3))
        if kind == 0:
            name, found = "swap", self._swap(incumbent)
        elif kind == 1:
            name, found = "oscillation", self._oscillate(*self._relaxed(incumbent))
        else:
            top = self._baseline
            name, found = "tightening", self._oscillate(top, top.peak_bytes)
        if found is not None:
            found = self._refiner.defer_weight_gradients(found, self._budget_bytes)
        return name, found

    # --- oscillation ---

    def _oscillate(self, top: Candidate, top_bytes: int) -> Candidate | None:
        """A schedule for a larger budget, tightened budget by budget; None if that fails."""
        found: Candidate | None = top
        if self._random.random() < 0.5 and top.peak_bytes <= top_bytes:
            found = self._refiner.defer_weight_gradients(top, top_bytes)
        prices = scaled_recompute_times(self._costs, self._price_factors())
        for budget_bytes in self._falling_budgets(top_bytes):
            found = found and self._refiner.repair_and_refine(found, budget_bytes, prices)
        return found

    def _relaxed(self, incumbent: Candidate) -> tuple[Candidate, int]:
        """The incumbent refined for a larger budget, and that budget."""
        top_bytes = int(_MAX_RELAXATION ** self._random.random() * self._budget_bytes)
        return self._refiner.refine(incumbent, top_bytes), top_bytes

    def _falling_budgets(self, top_bytes: int) -> Iterator[int]:
        """Budgets below one in a geometric sequence, down to the budget of the search."""
        budget_bytes = int(top_bytes / _TIGHTENING_RATIO)
        while budget_bytes > self._budget_bytes:
            yield budget_bytes
            budget_bytes = int(budget_bytes / _TIGHTENING_RATIO)
        yield self._budget_bytes

    # --- swap ---

    def _swap(self, incumbent: Candidate) -> Candidate | None:
        """Keeps the values of some recomputations and evicts others; None if that fails.

        The recomputations are neighbours in the schedule, or any.
        """
        positions = incumbent.schedule.recomputed_positions()
        if not positions:
            return None
        ranges = LiveRanges(self._graph, self._costs, incumbent.schedule, incumbent.simulation)
        factors = self._price_factors()
        for position in self._some_of(positions):
            if not ranges.is_dropped(position) and not ranges.must_stay(position):
                factors[ranges.op_at(position).index] *= _NEVER
                ranges.drop(position, ranges.extensions_for_drop(position))
        prices = scaled_recompute_times(self._costs, factors)
        swapped = self._refiner.evaluate(ranges.schedule())
        return self._refiner.repair_and_refine(swapped, self._budget_bytes, prices)

    def _some_of(self, positions: Sequence[int]) -> list[int]:
        number = 1 + int(self._random.integers(_MAX_SWAPPED))
        if self._random.random() < 0.5:
            first = int(self._random.integers(len(positions)))
            return list(positions[first : first + number])
        return [positions[int(self._random.integers(len(positions)))] for _ in range(number)]

    # --- both ---

    def _price_factors(self) -> Floats:
        """A factor for the recompute time of each op."""
        normal = self._random.standard_normal(len(self._costs.recompute))
        # Mostly little noise: it is paid by every op, and helps at few.
        return np.exp(_PRICE_NOISE * self._random.random() ** 2 * normal)
