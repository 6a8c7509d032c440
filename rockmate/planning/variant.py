"""A captured step with all that planning it takes, each part computed on demand."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.solver_time import SolverTime
from rockmate.costs.cost import Costs
from rockmate.graph.blocks import BlockChain, partition
from rockmate.graph.ir import Graph
from rockmate.graph.snapshot import SnapshotChain, StepSnapshot
from rockmate.graph.snapshot_capture import snapshot_chain, snapshot_of
from rockmate.planning.baseline_search import Searcher
from rockmate.planning.block_options import SolvedBlocks
from rockmate.planning.candidate import Candidate
from rockmate.planning.local_search import LocalSearch
from rockmate.planning.stopping_rule import StoppingRule
from rockmate.planning.strategies import BITWISE, UNMOVED, make_local_search, make_search
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import Simulation, simulate
from rockmate.step import CapturedStep

# The only strategy that may use chunks. The others are there to compare with.
CHUNKING_STRATEGY = "rockmate"


class Variant:
    """A captured step with all that planning it takes, each part computed on demand.

    Args:
        step: as captured, or in chunks.
        costs: of its ops.
        solver_time: the time that all solves share.
        solved: block options that variants share.
        rule: when the search of the default strategy ends; None for no limit.
    """

    def __init__(
        self,
        step: CapturedStep,
        costs: Costs,
        solver_time: SolverTime,
        solved: SolvedBlocks,
        rule: StoppingRule | None = None,
    ) -> None:
        self.step = step
        self.costs = costs
        self._solver_time = solver_time
        self._solved = solved
        self._rule = rule
        self._searches: dict[str, Searcher] = {}

    def with_graph(self, graph: Graph) -> Variant:
        """The same with another graph of the same ops, whose costs are those of its own."""
        step = replace(self.step, graph=graph)
        return Variant(step, self.costs, self._solver_time, SolvedBlocks(), self._rule)

    @property
    def graph(self) -> Graph:
        """The step as ops on storages."""
        return self.step.graph

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
        return LowerBound(
            self.graph, self.costs, self.baseline.time_ms, solver_time=self._solver_time
        )

    @cached_property
    def snapshot(self) -> StepSnapshot:
        """The step as plain values."""
        return snapshot_of(self.graph, self.step.call)

    @property
    def text(self) -> str:
        """Tells the step and its options, whatever its costs."""
        options = self.step.options.to_json()
        return f"{self.snapshot.fingerprint} {self.snapshot.call_fingerprint} {options}"

    @cached_property
    def chain(self) -> SnapshotChain:
        """Its blocks as plain values."""
        return snapshot_chain(self.blocks)

    @cached_property
    def local_search(self) -> LocalSearch:
        """The search of the default strategy."""
        return make_local_search(
            self.graph,
            self.blocks,
            self.costs,
            lower_bound=self.lower_bound,
            solver_time=self._solver_time,
            solved=self._solved,
            rule=self._rule,
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
        """The search of a strategy."""
        if strategy in (CHUNKING_STRATEGY, UNMOVED, BITWISE):
            return self.local_search
        if strategy not in self._searches:
            self._searches[strategy] = make_search(
                strategy,
                self.graph,
                self.blocks,
                self.costs,
                solver_time=self._solver_time,
                lower_bound=self.lower_bound,
                solved=self._solved,
            )
        return self._searches[strategy]
