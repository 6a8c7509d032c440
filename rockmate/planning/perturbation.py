"""Rounds of the local search: relax the budget, perturb the prices, tighten again.

A greedy search ends where its prices lead it. A round leaves that place in two ways at once:

* **Relaxed budget** (strategic oscillation: Glover 1977). The incumbent is refined for a larger
  budget, drawn at random, so that values stay live again; or the round begins with another
  schedule above the budget, such as the baseline. It is then tightened step by step.
* **Perturbed prices** (noising: Charon and Hudry 1993). The recompute times that rank evictions are
  each multiplied by a random factor, so that other values are evicted first. Refinement and the
  judgement of the result use the true times.

Random numbers come from a generator with a fixed seed for each budget: a search is repeatable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log

import numpy as np

from rockmate.costs.cost import Costs, scaled_recompute_times
from rockmate.planning.candidate import Candidate
from rockmate.planning.refine import ScheduleRefiner

# Mean time of seven plans (a U-Net, GPT-2 and Llama of two layers; 0.3 to 0.5 of the peak) over the
# baseline's, after 0.6 s of rounds from the relaxation's start. Two runs of other random numbers
# are 0.003 apart, so these say that little depends on the numbers below:
#
# | share of rounds from other schedules | 0 | 0 | 0.3 | 0.3 | 0.3 | 0.15 | 0 |
# |---|---|---|---|---|---|---|---|
# | ratio while tightening | 1.15 | 1.3 | 1.3 | 1.3 | 2 | 1.15 | 1.15 |
# | noise | 0.5 | 0.5 | 0.5 | 0.7 | 0.5 | 0.5 | 0.25, relaxed up to 1.5 |
# | mean | 1.1961 | 1.1964 | 1.1932 | 1.1955 | 1.1959 | 1.2016 | 1.2001 |
_OTHERS_SHARE = 0.3
# The budget is relaxed by a factor between these, their logarithms being equally likely.
_MIN_RELAXATION, _MAX_RELAXATION = 1.05, 2.5
# Ratio between neighbouring budgets while tightening.
_TIGHTENING_RATIO = 1.3
# Largest standard deviation of the logarithm of a price's factor.
_PRICE_NOISE = 0.5
# Weight gradients are deferred in results that are slower than the incumbent by less than this
# share of its time.
_DEFERRAL_SLACK = 1e-2


class Perturbation:
    """Random rounds from one incumbent after the other.

    Args:
        refiner: repairs and refines schedules of the graph.
        costs: the true costs of its ops.
        others: schedules above the budget, from which some of the rounds begin.
        budget_bytes: the budget of the incumbents.
    """

    def __init__(
        self, refiner: ScheduleRefiner, costs: Costs, others: Sequence[Candidate], budget_bytes: int
    ) -> None:
        self._refiner = refiner
        self._costs = costs
        self._others = others
        self._budget_bytes = budget_bytes
        self._random = np.random.default_rng(0)

    def round(self, incumbent: Candidate) -> Candidate | None:
        """Another schedule within the budget; None if tightening fails."""
        found: Candidate | None
        found, top_bytes = self._relaxed(incumbent)
        if self._random.random() < 0.5 and found.peak_bytes <= top_bytes:
            found = self._refiner.defer_weight_gradients(found, top_bytes)
        prices = self._perturbed_costs()
        for budget_bytes in self._falling_budgets(top_bytes):
            found = self._refiner.repair(found, budget_bytes, prices)
            if found is None:
                return None
            refined = self._refiner.refine(found, budget_bytes)
            if refined.peak_bytes <= budget_bytes and refined.time_ms < found.time_ms:
                found = refined
        if found.time_ms < (1 + _DEFERRAL_SLACK) * incumbent.time_ms:
            return self._refiner.defer_weight_gradients(found, self._budget_bytes)
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

    def _perturbed_costs(self) -> Costs:
        normal = self._random.standard_normal(len(self._costs.recompute))
        # Mostly little noise: it is paid by every op, and helps at few.
        noise = _PRICE_NOISE * self._random.random() ** 2
        return scaled_recompute_times(self._costs, np.exp(noise * normal))
