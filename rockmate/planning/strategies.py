"""The planning strategies by name, each as a search."""

from __future__ import annotations

from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.solver_time import SolverTime
from rockmate.costs.cost import Costs
from rockmate.graph.blocks import BlockChain
from rockmate.graph.ir import Graph
from rockmate.planning.baseline_search import FamilySearch, Searcher
from rockmate.planning.block_options import SolvedBlocks
from rockmate.planning.branch_order import memory_minimizing_order
from rockmate.planning.checkmate_strategy import CheckmateSearch
from rockmate.planning.chen_family import chen_family
from rockmate.planning.local_search import LocalSearch
from rockmate.planning.rotor_family import RotorFamily
from rockmate.planning.starts import SolverWarmStarts
from rockmate.planning.stopping_rule import StoppingRule
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate

STRATEGIES = ("none", "chen", "rotor", "checkmate", "recompute", "bitwise", "rockmate")
# The default without moves, to compare with where values may move; else the default itself.
UNMOVED = "recompute"
# The default without chunks and moves, to compare with where plans may be in chunks.
BITWISE = "bitwise"


def make_search(
    strategy: str,
    graph: Graph,
    chain: BlockChain,
    costs: Costs,
    *,
    lower_bound: LowerBound,
    solver_time: SolverTime,
    solved: SolvedBlocks | None = None,
    rule: StoppingRule | None = None,
) -> Searcher:
    """The search of a strategy, for any budget.

    * "none" recomputes nothing; "chen" saves one boundary in every sqrt(n) blocks.
    * "rotor" saves or recomputes each block as a whole, by a dynamic program.
    * "checkmate" solves the whole graph as one program; for small models.
    * "rockmate", the default, is the local search, from the knapsack of the whole graph and from
      rotor with several options for blocks and spans; "recompute" and "bitwise" are it, too.

    Args:
        strategy: one of `STRATEGIES`.
        graph: ops and storages.
        chain: its blocks.
        costs: of its ops.
        lower_bound: of its schedules' times; "rockmate" stops near it.
        solver_time: the time that all solves share. "checkmate" may take all of it for each budget.
        solved: block options of other graphs of the same step; those solved here are added.
        rule: when the search of "rockmate" ends; None for the default tolerance and no limit.

    Raises:
        ValueError: the strategy is unknown, or plans one forward in flight and more are asked for.
    """
    if strategy not in STRATEGIES:
        msg = f"strategy is {strategy!r}; choose one of {', '.join(STRATEGIES)}"
        raise ValueError(msg)
    if strategy in ("none", "chen"):
        families = [[chen_family(graph, chain)]] if strategy == "chen" else []
        return FamilySearch(graph, costs, families)
    if strategy == "checkmate":
        return CheckmateSearch(graph, costs, time_limit_s=solver_time.limit_s)
    if strategy == "rotor":
        rotor = RotorFamily(
            graph,
            chain,
            costs,
            max_bytes=_baseline_peak_bytes(graph, costs),
            solver_time=solver_time,
            solved=solved,
            is_all_or_nothing=True,
        )
        return FamilySearch(graph, costs, [rotor.makers()], num_unproved=rotor.solver.num_unproved)
    return make_local_search(
        graph,
        chain,
        costs,
        lower_bound=lower_bound,
        solver_time=solver_time,
        solved=solved,
        rule=rule,
    )


def make_local_search(
    graph: Graph,
    chain: BlockChain,
    costs: Costs,
    *,
    lower_bound: LowerBound,
    solver_time: SolverTime,
    solved: SolvedBlocks | None = None,
    rule: StoppingRule | None = None,
) -> LocalSearch:
    """The search of "rockmate"; arguments as for `make_search`."""
    backward = memory_minimizing_order(graph, costs)
    if backward is not None:
        chain = chain.with_backward_as_in(backward)
    starts = SolverWarmStarts(
        graph,
        chain,
        costs,
        lower_bound,
        max_bytes=_baseline_peak_bytes(graph, costs),
        solver_time=solver_time,
        solved=solved,
    )
    return LocalSearch(graph, costs, starts, rule, backward=backward)


def _baseline_peak_bytes(graph: Graph, costs: Costs) -> int:
    return simulate(graph, baseline_schedule(graph), costs).peak_bytes
