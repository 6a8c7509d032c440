"""The perturbations of the local search: ways out of the place where greedy moves have ended.

A round takes the incumbent, perturbs it and repairs it for the budget again. Two kinds alternate at
random:

* **Oscillation** (strategic oscillation: Glover 1977). The incumbent is refined for a larger
  budget, so that values stay live again; or the round begins with another schedule above the
  budget. It is then tightened budget by budget.
* **Swap** (the kick of an iterated local search: Lourenco, Martin and Stützle 2003). A few
  recomputations are removed whether they fit or not, and other values are evicted instead.

In both, the recompute times that rank evictions are multiplied by random factors (noising: Charon
and Hudry 1993), so that other values are evicted first. Refinement and the judgement of the result
use the true times. Random numbers come from a generator with a fixed seed for each budget: a search
is repeatable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log

import numpy as np

from rockmate._arrays import Floats
from rockmate.costs.cost import Costs, scaled_recompute_times
from rockmate.planning.candidate import Candidate
from rockmate.planning.live_ranges import LiveRanges
from rockmate.planning.search_problem import SearchProblem

# The mean time of 44 plans (`bench.search_stages`) hardly depends on the numbers below: it is
# within 0.002 of the baseline's time for 0.3 or 0.5 of oscillations from other schedules, ratios of
# 1.3 or drawn from 1.15 to 1.8, relaxations up to 2.5 or 4, noise of 0.5 or 0.8. Other random
# numbers make a difference of 0.001.
_OSCILLATION_SHARE = 0.5
# Of these, the share that begins with another schedule above the budget.
_OTHERS_SHARE = 0.3
# The budget is relaxed by a factor between these, their logarithms being equally likely.
_MIN_RELAXATION, _MAX_RELAXATION = 1.05, 2.5
# Ratio between neighbouring budgets while tightening.
_TIGHTENING_RATIO = 1.3
# Largest standard deviation of the logarithm of a price's factor.
_PRICE_NOISE = 0.5
# Largest number of recomputations that a swap removes.
_MAX_SWAPPED = 4
# Factor on the price of a value that a swap has just kept: another is evicted in its place.
_SWAPPED_PRICE = 4.0
# Weight gradients are deferred in results that are slower than the incumbent by less than this
# share of its time.
_DEFERRAL_SLACK = 1e-2


class Perturbation:
    """Random rounds from one incumbent after the other.

    Args:
        problem: the graph and the refiner of its schedules.
        others: schedules above the budget, from which some of the rounds begin.
        budget_bytes: the budget of the incumbents.
    """

    def __init__(
        self, problem: SearchProblem, others: Sequence[Candidate], budget_bytes: int
    ) -> None:
        self._graph = problem.graph
        self._refiner = problem.refiner
        self._costs = problem.costs
        self._others = others
        self._budget_bytes = budget_bytes
        self._random = np.random.default_rng(0)

    def round(self, incumbent: Candidate) -> tuple[str, Candidate | None]:
        """The kind of perturbation, and another schedule within the budget.

        None if the perturbed schedule cannot be made to fit.
        """
        if self._random.random() < _OSCILLATION_SHARE:
            kind, found = "oscillation", self._oscillate(incumbent)
        else:
            kind, found = "swap", self._swap(incumbent)
        if found is not None and found.time_ms < (1 + _DEFERRAL_SLACK) * incumbent.time_ms:
            found = self._refiner.defer_weight_gradients(found, self._budget_bytes)
        return kind, found

    # --- oscillation ---

    def _oscillate(self, incumbent: Candidate) -> Candidate | None:
        found: Candidate | None
        found, top_bytes = self._relaxed(incumbent)
        if self._random.random() < 0.5 and found.peak_bytes <= top_bytes:
            found = self._refiner.defer_weight_gradients(found, top_bytes)
        prices = scaled_recompute_times(self._costs, self._price_factors())
        for budget_bytes in self._falling_budgets(top_bytes):
            found = self._tightened(found, budget_bytes, prices)
            if found is None:
                return None
        return found

    def _relaxed(self, incumbent: Candidate) -> tuple[Candidate, int]:
        """A schedule for a larger budget, and that budget."""
        if self._others and self._random.random() < _OTHERS_SHARE:
            other = self._others[int(self._random.integers(len(self._others)))]
            return other, other.peak_bytes
        low, high = log(_MIN_RELAXATION), log(_MAX_RELAXATION)
        factor = exp(low + (high - low) * self._random.random())
        top_bytes = int(factor * self._budget_bytes)
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
                factors[ranges.op_at(position).index] *= _SWAPPED_PRICE
                ranges.drop(position, ranges.extensions_for_drop(position))
        prices = scaled_recompute_times(self._costs, factors)
        swapped = self._refiner.evaluate(ranges.schedule())
        return self._tightened(swapped, self._budget_bytes, prices)

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

    def _tightened(
        self, candidate: Candidate, budget_bytes: int, prices: Costs
    ) -> Candidate | None:
        """The candidate repaired at these prices and refined at the true ones; None if it fails."""
        found = self._refiner.repair(candidate, budget_bytes, prices)
        if found is None:
            return None
        refined = self._refiner.refine(found, budget_bytes)
        is_better = refined.peak_bytes <= budget_bytes and refined.time_ms < found.time_ms
        return refined if is_better else found
