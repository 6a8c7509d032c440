"""The planning strategies by name, each as a search of one graph.

Those to compare with take the fastest schedule of a family as it is: solvers propose schedules, the
simulator judges each by its peak, and nothing is repaired or refined.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, cached_property
from math import isqrt

from rockmate.bound.lower_bound import LowerBound
from rockmate.costs.cost import Costs
from rockmate.errors import check_choice
from rockmate.graph.blocks import BlockChain, partition
from rockmate.graph.ir import Graph
from rockmate.planning.branch_order import memory_minimizing_order
from rockmate.planning.candidate import Candidate, by_peak, evaluate, feasible
from rockmate.planning.checkmate_strategy import CheckmateSearch
from rockmate.planning.local_search import LocalSearch
from rockmate.planning.lowering import lower_sequence
from rockmate.planning.rotor_family import RotorFamily
from rockmate.planning.search_problem import SearchProblem, StoppingRule
from rockmate.planning.starts import WarmStarts
from rockmate.schedule.schedule import Schedule, baseline_schedule
from rockmate.schedule.simulate import Simulation, simulate
from rotor import Step

STRATEGIES = ("none", "chen", "rotor", "checkmate", "recompute", "bitwise", "rockmate")
DEFAULT = "rockmate"
# The default without moves, to compare with where values may move; else the default itself.
UNMOVED = "recompute"
# The default without chunks and moves, to compare with where plans may be in chunks.
BITWISE = "bitwise"


class FamilySearch:
    """The choice among the baseline and the schedules of a family, none of them changed."""

    def __init__(self, graph: Graph, costs: Costs, family: Iterable[Schedule]) -> None:
        schedules = (baseline_schedule(graph), *family)
        self._candidates = [evaluate(graph, schedule, costs) for schedule in schedules]

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest candidate with a peak of at most `budget_bytes`; None if there is none."""
        return next(iter(feasible(self._candidates, budget_bytes)), None)

    def minimum(self) -> Candidate:
        """The candidate with the smallest peak."""
        return min(self._candidates, key=by_peak)


Searcher = LocalSearch | CheckmateSearch | FamilySearch
"""A search for the fastest schedule within any budget."""


def chen_schedule(graph: Graph, chain: BlockChain) -> Schedule:
    """The schedule of Chen et al.: saves one boundary in every sqrt(n) blocks, recomputes the rest.

    "Training Deep Nets with Sublinear Memory Cost", 2016. It has no budget, and equal segments
    whatever the sizes of the blocks.
    """
    num_blocks = len(chain.blocks)
    length = isqrt(num_blocks - 1) + 1
    firsts = list(range(0, num_blocks, length))
    steps = [Step("F", stage) for stage in range(firsts[-1])]
    for first in reversed(firsts):
        segment = range(first, min(first + length, num_blocks))
        steps += [Step("K", stage) for stage in segment]
        steps += [Step("B", stage) for stage in reversed(segment)]
    return lower_sequence(graph, chain, tuple(steps))


class Searches:
    """A graph with its lower bound and the searches for its schedules, each made on demand.

    * "none" recomputes nothing; "chen" saves one boundary in every sqrt(n) blocks.
    * "rotor" saves or recomputes each block as a whole, by a dynamic program.
    * "checkmate" solves the whole graph as one program; for small models.
    * "rockmate", the default, is the local search, from the knapsack of the whole graph;
      "recompute" and "bitwise" are it, too.

    Args:
        rule: when the local search ends, and how long "checkmate" may take for each budget; None
            for the default tolerance and no limit.
    """

    def __init__(self, graph: Graph, costs: Costs, rule: StoppingRule | None = None) -> None:
        self.graph, self.costs = graph, costs
        self._rule = rule or StoppingRule()
        self._made = cache(self._new_search)

    def with_graph(self, graph: Graph, costs: Costs) -> Searches:
        """The searches of another graph of the same ops."""
        return Searches(graph, costs, self._rule)

    @cached_property
    def blocks(self) -> BlockChain:
        """Its chain of blocks."""
        return partition(self.graph)

    @cached_property
    def baseline(self) -> Simulation:
        """The simulated schedule without recomputation."""
        return simulate(self.graph, baseline_schedule(self.graph), self.costs)

    @cached_property
    def lower_bound(self) -> LowerBound:
        """The lower bound on the time of its schedules."""
        return LowerBound(self.graph, self.costs, self.baseline.time_ms)

    @cached_property
    def local_search(self) -> LocalSearch:
        """The search of the default strategy."""
        backward = memory_minimizing_order(self.graph, self.costs)
        chain = self.blocks if backward is None else self.blocks.with_backward_as_in(backward)
        starts = WarmStarts(self.graph, chain, self.costs, self.lower_bound)
        return LocalSearch(
            SearchProblem(self.graph, self.costs, starts, self._rule, backward=backward)
        )

    def quick_start(self, budget_bytes: int) -> Candidate | None:
        """The relaxation's schedule made to fit a budget; None if there is none or repair fails.

        It takes milliseconds, where the search's own starts need the smallest peak first. Where
        repair fails, the budget is close to that peak, and plans take very long.
        """
        relaxed = self.local_search.relaxed(budget_bytes)
        refiner = self.local_search.problem.refiner
        return relaxed and refiner.repair_and_refine(relaxed, budget_bytes)

    def search(self, strategy: str) -> Searcher:
        """The search of a strategy.

        Raises:
            InvalidArgumentError: the strategy is unknown, or plans one forward in flight and more
                are asked for.
        """
        check_choice("strategy", strategy, STRATEGIES)
        if strategy in (DEFAULT, UNMOVED, BITWISE):
            return self.local_search
        return self._made(strategy)

    def _new_search(self, strategy: str) -> Searcher:
        if strategy == "checkmate":
            return CheckmateSearch(self.graph, self.costs, time_limit_s=self._rule.time_limit_s)
        if strategy != "rotor":
            family = [chen_schedule(self.graph, self.blocks)] if strategy == "chen" else []
            return FamilySearch(self.graph, self.costs, family)
        max_bytes = self.baseline.peak_bytes
        rotor = RotorFamily(self.graph, self.blocks, self.costs, max_bytes=max_bytes)
        return FamilySearch(self.graph, self.costs, rotor.schedules())
