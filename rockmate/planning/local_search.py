"""Local search: the fastest schedule within one budget, from warm starts and three moves.

Stages, each skipped where the incumbent is near the lower bound (`search_problem`):

1. Starts from the relaxation and the knapsack, repaired and refined (`refine`).
2. Starts from the tightening path of the baseline, with weight gradients deferred.
3. Starts from rotor's table, for tight budgets where a value is recomputed more than once.
4. Deferral, tightening paths without deferral, and strategic oscillation of the best
   (`oscillation`).
5. Random rounds until they gain nothing: the budget is relaxed, prices are perturbed, and the
   schedule is tightened again (`perturbation`).

The moves are those of `moves` and `deferral`: remove a recomputation, evict a value, defer a weight
gradient. The simulator judges every schedule. The search is a heuristic: it proves nothing, and the
gap to the lower bound tells how good a result is. Nearest in the literature is local search with
strategic oscillation and warm starts (Glover 1977).

It ends earlier where the incumbent is within the gap tolerance of the lower bound, and when its
time is over (`stopping_rule`). The answer depends on the budget alone, not on earlier questions,
unless the clock ends a search. Caches only save time. A long step (`refine.LONG_STEP_OPS`) leaves
out stage 2 and most of stage 4, and has few rounds or none.

Many budgets together: `joint_search`. `search_trace` logs each stage: the incumbent's time and gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import inf
from typing import NamedTuple

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op
from rockmate.planning.baseline_search import FRONTIER_POINTS
from rockmate.planning.candidate import (
    MAX_EXCESS,
    Candidate,
    by_time,
    fastest,
    feasible,
    frontier_at,
    is_worth_refining,
    linspace_int,
    repairable,
    subsample_indices,
)
from rockmate.planning.family import Family
from rockmate.planning.min_peak import MinPeakPool
from rockmate.planning.oscillation import StrategicOscillation
from rockmate.planning.perturbation import Perturbation
from rockmate.planning.search_problem import (
    SKIP_DISTANT_STARTS_BELOW_GAP,
    SKIP_REFINEMENT_BELOW_GAP,
    SKIP_ROTOR_BELOW_GAP,
    SKIP_STARTS_BELOW_GAP,
    SearchProblem,
)
from rockmate.planning.search_trace import SearchTrace
from rockmate.planning.starts import WarmStarts
from rockmate.planning.stopping_rule import StoppingRule
from rockmate.planning.tightening import TighteningPath

# Number of limits on saved bytes tried to find the knapsack schedule that just fits.
_MAX_KNAPSACK_LIMITS = 3
# That search ends when the limits that fit and exceed differ by this share of the budget.
_LIMIT_SEARCH_TOLERANCE = 1e-3
# Number of starts above the budget that are tried in turn until one can be repaired.
_MAX_REPAIR_STARTS = 3
# Below this multiple of the minimum, more starts are repaired: there the choice matters more.
_TIGHT_BUDGET_FACTOR = 1.5
# Number of starts that are repaired at such a tight budget.
_NUM_TIGHT_STARTS = 6
# Ratio by which the baseline is tightened step by step, with weight gradients deferred each time.
_BUDGET_RATIO_TIGHTEN_DEFERRED = 1.05
# Ratios by which the baseline is tightened step by step, without deferral.
_BUDGET_RATIOS_TIGHTEN = (1.1, 1.15, 1.3, 1.6, 2.0, inf)
# The same for a long step, where all ratios together would take too long.
_BUDGET_RATIOS_TIGHTEN_LONG = (1.6, 2.0)
# The fastest schedule at the minimum budget sometimes fits in less, in practice never below this
# fraction of it.
_MIN_BUDGET_FRACTION = 0.9
# The search has stalled after so many rounds that have gained nothing, and of so many ops together;
# steps of more ops have none. Nearer to the bound than `_FULL_EFFORT_GAP` it is less, in proportion
# to what can still be gained.
_STALL_ROUNDS = 24
_STALL_OPS = 6_000
_FULL_EFFORT_GAP = 1e-2
# A round counts as a gain if it takes more than this fraction off the baseline's time.
_MIN_GAIN = 1e-5


class StartGroup(NamedTuple):
    """Candidate starts, of which the first that can be made feasible is refined.

    Attributes:
        source: name of the group in the trace.
        skip_below_gap: the incumbent's gap below which this group and all later ones are skipped.
        starts: the candidates in the order in which they are tried.
    """

    source: str
    skip_below_gap: float
    starts: Sequence[Candidate]


class InitialCandidates(NamedTuple):
    """The incumbents after the starts, before deferral and oscillation.

    Attributes:
        from_starts: the fastest that results from warm starts.
        overall: the fastest of these and of the tightening path with deferral.
    """

    from_starts: Candidate
    overall: Candidate


class LocalSearch:
    """The search of the default strategy.

    Nothing is solved before it is asked for.

    Args:
        graph: ops and storages.
        costs: of its ops.
        starts: the warm starts, and the lower bound.
        rule: when the search ends; None for the default tolerance and no limit.
        backward: late and backward ops in the baseline's order; None for the graph's order.

    Attributes:
        problem: the graph with its baseline, starts and refiner.
        min_peak: the schedules of small peaks.
        oscillation: the strategic oscillation of this problem.
        traces: what the search for each budget did, by budget.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        starts: WarmStarts,
        rule: StoppingRule | None = None,
        *,
        backward: Sequence[Op] | None = None,
    ) -> None:
        rule = rule or StoppingRule()
        self.problem = SearchProblem(graph, costs, starts, rule, backward=backward)
        self.min_peak = MinPeakPool(self.problem)
        self.oscillation = StrategicOscillation(self.problem)
        self._refiner = self.problem.refiner
        self.traces: dict[int, SearchTrace] = {}
        self._num_ops = len(graph.ops)
        self._num_in_flight = graph.num_in_flight
        self._solved: dict[int, Candidate] = {}
        self._first: dict[int, Candidate] = {}

    @property
    def num_unproved(self) -> int:
        """See `Searcher`."""
        return self.problem.starts.num_unproved

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest schedule found with a simulated peak of at most `budget_bytes`.

        None if the budget is below the minimum. A smaller budget has an answer where the fastest
        schedule at the minimum happens to need no more.
        """
        minimum_bytes = self.minimum().peak_bytes
        if budget_bytes >= minimum_bytes:
            return self._solve(budget_bytes)
        if (
            budget_bytes < _MIN_BUDGET_FRACTION * minimum_bytes
            or self._best_at_minimum.peak_bytes > budget_bytes
        ):
            return None
        return self._best_at_minimum

    def initial_within(self, budget_bytes: int) -> Candidate | None:
        """The incumbent after the starts that take milliseconds.

        None as for `best_within`.
        """
        if budget_bytes < self.minimum().peak_bytes:
            return self.best_within(budget_bytes)
        return self._from_knapsack(budget_bytes)

    def frontier(self) -> list[tuple[int, Candidate]]:
        """See `Searcher`."""
        low, high = self.minimum().peak_bytes, self.problem.baseline.peak_bytes
        return frontier_at(linspace_int(low, high, FRONTIER_POINTS), self.best_within)

    def minimum(self) -> Candidate:
        """See `Searcher`."""
        return self.min_peak.minimum()

    @cached_property
    def _best_at_minimum(self) -> Candidate:
        return self._solve(self.minimum().peak_bytes)

    def _solve(self, budget_bytes: int) -> Candidate:
        """The best of all stages but the start from a smaller budget; cached."""
        if budget_bytes not in self._solved:
            from_starts, best = self._initial_candidates(budget_bytes)
            if not self._is_within(best, budget_bytes, SKIP_ROTOR_BELOW_GAP):
                best = fastest(self._intensify(from_starts, budget_bytes), best)
                best = self._perturb(best, budget_bytes)
            self._solved[budget_bytes] = best
        return self._solved[budget_bytes]

    def _from_knapsack(self, budget_bytes: int) -> Candidate:
        if budget_bytes not in self._first:
            best = self.min_peak.fastest_within(budget_bytes)
            self._note("smallest peaks", best, budget_bytes)
            best = self._refine_starts(best, self._knapsack_starts(budget_bytes), budget_bytes)
            self._first[budget_bytes] = best
        return self._first[budget_bytes]

    def _initial_candidates(self, budget_bytes: int) -> InitialCandidates:
        best = self._from_knapsack(budget_bytes)
        overall = self._tighten_with_deferral(best, budget_bytes)
        if not self._is_within(overall, budget_bytes, SKIP_ROTOR_BELOW_GAP):
            best = self._refine_starts(best, self._rotor_starts(budget_bytes), budget_bytes)
        return InitialCandidates(best, overall)

    def _is_within(self, candidate: Candidate, budget_bytes: int, gap: float) -> bool:
        return self.problem.is_within_gap(candidate, budget_bytes, gap)

    def _note(self, source: str, candidate: Candidate, budget_bytes: int) -> None:
        """Adds a stage to the trace of a budget."""
        if budget_bytes not in self.traces:
            self.traces[budget_bytes] = SearchTrace(
                budget_bytes=budget_bytes,
                baseline_ms=self.problem.baseline.time_ms,
                bound_ms=self.problem.starts.bound_ms(budget_bytes),
            )
        self.traces[budget_bytes].note(source, candidate)

    # --- warm starts ---

    def _refine_starts(
        self, best: Candidate, groups: Iterable[StartGroup], budget_bytes: int
    ) -> Candidate:
        """The fastest of an incumbent and of each group's result, until its gap is small enough."""
        for group in groups:
            if self._is_within(best, budget_bytes, group.skip_below_gap):
                return best
            best = fastest(best, self._first_refined(group.starts, budget_bytes, best.time_ms))
            self._note(group.source, best, budget_bytes)
        return best

    def _first_refined(
        self, starts: Sequence[Candidate], budget_bytes: int, incumbent_ms: float
    ) -> Candidate | None:
        """The refined form of the first start that can be made feasible; None if there is none.

        A start above the budget that is no faster than the incumbent is skipped.
        """
        for start in starts:
            if self.problem.rule.is_late:
                return None
            if is_worth_refining(start, budget_bytes, incumbent_ms):
                refined = self._refiner.repair_and_refine(start, budget_bytes)
                if refined is not None:
                    return refined
        return None

    def _knapsack_starts(self, budget_bytes: int) -> Iterator[StartGroup]:
        """The relaxation's schedule, and knapsack schedules just within and above the budget."""
        starts, baseline = self.problem.starts, self.problem.baseline
        schedule = starts.from_relaxation(budget_bytes)
        if schedule is None:
            return
        found = self._refiner.evaluate(schedule)
        yield StartGroup("relaxation", SKIP_STARTS_BELOW_GAP, [found])
        limit_bytes, low, high = found.simulation.saved_bytes, 0, baseline.simulation.saved_bytes
        tried: list[Candidate] = []
        tolerance_bytes = _LIMIT_SEARCH_TOLERANCE * budget_bytes
        while len(tried) < _MAX_KNAPSACK_LIMITS and high - low > tolerance_bytes:
            # As a rule, the peak falls by a byte with each byte that is not saved, for each forward
            # in flight.
            limit_bytes -= -((budget_bytes - found.peak_bytes) // self._num_in_flight)
            if not low < limit_bytes < high:
                limit_bytes = (low + high) // 2
            schedule = starts.from_knapsack(limit_bytes)
            if schedule is None:
                break
            found = self._refiner.evaluate(schedule)
            tried.append(found)
            if found.peak_bytes <= budget_bytes:
                low = limit_bytes
            else:
                high = limit_bytes
        fits, exceeds = feasible(tried, budget_bytes)[:1], repairable(tried, budget_bytes)[:1]
        yield StartGroup("knapsack, within", SKIP_STARTS_BELOW_GAP, fits)
        yield StartGroup("knapsack, above", SKIP_STARTS_BELOW_GAP, exceeds)

    @cached_property
    def _rotor_family(self) -> Family:
        return Family(self.problem.starts.from_rotor(), self._refiner.evaluate)

    def _rotor_starts(self, budget_bytes: int) -> Iterator[StartGroup]:
        """Schedules of rotor's table: those of the grid first, then those nearest to the budget.

        To make a schedule beyond the grid takes as long as to refine one, and seldom gains as much.
        """
        grid = self._rotor_family.grid()
        above = repairable(grid, budget_bytes)
        yield StartGroup("rotor's grid, above", SKIP_STARTS_BELOW_GAP, above[:1])
        within = feasible([*self.min_peak.candidates, *grid], budget_bytes)
        yield StartGroup("rotor's grid, within", SKIP_STARTS_BELOW_GAP, within[:1])
        yield StartGroup("rotor's grid, within", SKIP_REFINEMENT_BELOW_GAP, [])
        near_budget = self._rotor_family.near_budget(budget_bytes)
        fits = feasible(near_budget, budget_bytes)[:1]
        yield StartGroup("rotor, within", SKIP_REFINEMENT_BELOW_GAP, fits)
        above = repairable([*grid, *near_budget], budget_bytes)
        first_above = above[:_MAX_REPAIR_STARTS]
        yield StartGroup("rotor, above", SKIP_REFINEMENT_BELOW_GAP, first_above)
        if budget_bytes < _TIGHT_BUDGET_FACTOR * self.minimum().peak_bytes:
            for index in subsample_indices(len(above), _NUM_TIGHT_STARTS)[1:]:
                yield StartGroup("rotor, far above", SKIP_REFINEMENT_BELOW_GAP, [above[index]])
        for start in self.min_peak.starts:
            if start.time_ms > self.problem.baseline.time_ms:
                yield StartGroup("smallest starts", SKIP_DISTANT_STARTS_BELOW_GAP, [start])

    # --- tightening from above ---

    @cached_property
    def _path_with_deferral(self) -> TighteningPath:
        baseline = self.problem.baseline
        return TighteningPath(baseline, _BUDGET_RATIO_TIGHTEN_DEFERRED, self._refine_and_defer)

    @cached_property
    def _paths(self) -> list[TighteningPath]:
        ratios = _BUDGET_RATIOS_TIGHTEN_LONG if self.problem.is_long else _BUDGET_RATIOS_TIGHTEN
        baseline, improve = self.problem.baseline, self._refiner.repair_and_refine
        return [TighteningPath(baseline, ratio, improve) for ratio in ratios]

    def _tighten_with_deferral(self, best: Candidate, budget_bytes: int) -> Candidate:
        """The fastest of an incumbent and of the path with deferral around the budget.

        Of a long step, the incumbent.
        """
        if self.problem.is_long:
            return best
        path = self._path_with_deferral
        for neighbour_of in (path.smallest_above, path.largest_below):
            if self._is_within(best, budget_bytes, SKIP_ROTOR_BELOW_GAP):
                return best
            start = neighbour_of(budget_bytes)
            if start is not None:
                best = fastest(best, self._refine_and_defer(start, budget_bytes))
                self._note("tightening with deferral", best, budget_bytes)
        return best

    def _refine_and_defer(self, candidate: Candidate, budget_bytes: int) -> Candidate | None:
        """Repairs and refines, and defers weight gradients if the gap is still large."""
        found = self._refiner.repair_and_refine(candidate, budget_bytes)
        if found is None or self._is_within(found, budget_bytes, SKIP_REFINEMENT_BELOW_GAP):
            return found
        return self._refiner.defer_weight_gradients(found, budget_bytes)

    def _tightened_from_above(self, best: Candidate, budget_bytes: int) -> list[Candidate]:
        """Schedules far above the budget, tightened to it by eviction.

        The warm starts know little of parallel branches, where these are often better.
        """
        starts = [path.smallest_above(budget_bytes) for path in self._paths]
        if not (
            self.problem.is_long
            or self._is_within(best, budget_bytes, SKIP_DISTANT_STARTS_BELOW_GAP)
        ):
            starts += [
                candidate
                for candidate in self._rotor_family.grid()
                if candidate.peak_bytes > MAX_EXCESS * budget_bytes
            ]
        found = (
            self._refiner.repair_and_refine(start, budget_bytes)
            for start in starts
            if start is not None and not self.problem.rule.is_late
        )
        return [candidate for candidate in found if candidate is not None]

    # --- intensification ---

    def _intensify(self, best: Candidate, budget_bytes: int) -> Candidate:
        """The best that deferral and oscillation make of an incumbent and of tightened schedules.

        Far from the bound, both are oscillated. Nearer, and for a long step, the faster of the two.
        """
        if self._is_within(best, budget_bytes, SKIP_REFINEMENT_BELOW_GAP):
            return best
        found = self._refiner.defer_weight_gradients(best, budget_bytes)
        self._note("deferral", found, budget_bytes)
        if self.oscillation.is_skipped(found, budget_bytes):
            return found
        tightened = min(self._tightened_from_above(best, budget_bytes), key=by_time, default=best)
        self._note("tightening from above", tightened, budget_bytes)
        oscillated = self.oscillation.run(fastest(best, tightened), budget_bytes)
        found = fastest(found, oscillated)
        self._note("oscillation", found, budget_bytes)
        return found

    def _perturb(self, best: Candidate, budget_bytes: int) -> Candidate:
        """The fastest of an incumbent and of random rounds, until they gain nothing."""
        others = [self.problem.baseline, *self._rotor_family.grid()]
        perturbation = Perturbation(
            self._refiner,
            self.problem.costs,
            [other for other in others if other.peak_bytes > budget_bytes],
            budget_bytes,
        )
        min_gain_ms = _MIN_GAIN * self.problem.baseline.time_ms
        max_idle = min(_STALL_ROUNDS, _STALL_OPS // self._num_ops)
        num_idle = 0
        while not self._is_within(best, budget_bytes, SKIP_ROTOR_BELOW_GAP):
            effort = min(1.0, self.problem.gap(best, budget_bytes) / _FULL_EFFORT_GAP)
            if num_idle + 1 > effort * max_idle:
                break
            before_ms = best.time_ms
            best = fastest(best, perturbation.round(best))
            self._note("round", best, budget_bytes)
            num_idle = 0 if best.time_ms < before_ms - min_gain_ms else num_idle + 1
        return best
