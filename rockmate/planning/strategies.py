"""The planning strategies by name, each as a search of one graph."""

from __future__ import annotations

from functools import cached_property

from rockmate.bound.lower_bound import LowerBound
from rockmate.costs.cost import Costs
from rockmate.errors import check_choice
from rockmate.graph.blocks import BlockChain, partition
from rockmate.graph.ir import Graph
from rockmate.planning.baseline_search import FamilySearch, Searcher, chen_schedule
from rockmate.planning.branch_order import memory_minimizing_order
from rockmate.planning.candidate import Candidate
from rockmate.planning.checkmate_strategy import CheckmateSearch
from rockmate.planning.local_search import LocalSearch
from rockmate.planning.rotor_family import RotorFamily
from rockmate.planning.search_problem import SearchProblem, StoppingRule
from rockmate.planning.starts import WarmStarts
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import Simulation, simulate

STRATEGIES = ("none", "chen", "rotor", "checkmate", "recompute", "bitwise", "rockmate")
DEFAULT = "rockmate"
# The default without moves, to compare with where values may move; else the default itself.
UNMOVED = "recompute"
# The default without chunks and moves, to compare with where plans may be in chunks.
BITWISE = "bitwise"


class Searches:
    """A graph with its lower bound and the searches for its schedules, each made on demand.

    * "none" recomputes nothing; "chen" saves one boundary in every sqrt(n) blocks.
    * "rotor" saves or recomputes each block as a whole, by a dynamic program.
    * "checkmate" solves the whole graph as one program; for small models.
    * "rockmate", the default, is the local search, from the knapsack of the whole graph;
      "recompute" and "bitwise" are it, too.

    Args:
        graph: ops and storages.
        costs: of its ops.
        rule: when the local search ends, and how long "checkmate" may take for each budget; None
            for the default tolerance and no limit.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        rule: StoppingRule | None = None,
    ) -> None:
        self.graph, self.costs = graph, costs
        self._rule = rule or StoppingRule()
        self._made: dict[str, Searcher] = {}

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
        if strategy not in self._made:
            self._made[strategy] = self._new_search(strategy)
        return self._made[strategy]

    def _new_search(self, strategy: str) -> Searcher:
        if strategy == "checkmate":
            return CheckmateSearch(self.graph, self.costs, time_limit_s=self._rule.time_limit_s)
        if strategy != "rotor":
            family = [chen_schedule(self.graph, self.blocks)] if strategy == "chen" else []
            return FamilySearch(self.graph, self.costs, family)
        max_bytes = self.baseline.peak_bytes
        rotor = RotorFamily(self.graph, self.blocks, self.costs, max_bytes=max_bytes)
        return FamilySearch(self.graph, self.costs, rotor.schedules())
