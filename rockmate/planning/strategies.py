"""Ways of planning by name, each as a search over its own families of schedules."""

from __future__ import annotations

from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.solver_time import SolverTime
from rockmate.costs.cost import Costs
from rockmate.graph.blocks import BlockChain
from rockmate.graph.ir import Graph
from rockmate.planning.baseline_search import Search, Searcher
from rockmate.planning.block_options import SolvedBlocks
from rockmate.planning.branch_order import memory_minimizing_order
from rockmate.planning.checkmate_strategy import CheckmateSearch
from rockmate.planning.chen_family import chen_family
from rockmate.planning.local_search import LocalSearch
from rockmate.planning.rotor_family import RotorFamily
from rockmate.planning.starts import SolverWarmStarts
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate

STRATEGIES = ("none", "chen", "rotor", "checkmate", "rockmate")


def make_search(
    strategy: str,
    graph: Graph,
    chain: BlockChain,
    costs: Costs,
    *,
    certificate: LowerBound,
    solver_time: SolverTime,
    solved: SolvedBlocks | None = None,
) -> Searcher:
    """What finds schedules for any budget; "rockmate" and "checkmate" solve what they need when they are asked.

    Args:
        strategy: "none" recomputes nothing; "chen" keeps one boundary in every sqrt(n) blocks; "rotor" chooses by dynamic program
            which blocks save everything and which run again as a whole; "checkmate" solves the whole graph as one program, for
            small models; "rockmate" solves the whole graph as a knapsack, gives
            blocks and spans of blocks several options where that is not near enough, and improves the result run by run.
        graph: ops and storages.
        chain: its blocks.
        costs: of its ops.
        certificate: its bound, near which "rockmate" stops searching.
        solver_time: what its solves share; of "checkmate" each budget may take all of it.
        solved: blocks that other graphs of the same step have had solved; those solved here join them.

    Raises:
        ValueError: there is no such strategy.
    """
    if strategy not in STRATEGIES:
        msg = f"strategy is {strategy!r}; choose one of {', '.join(STRATEGIES)}"
        raise ValueError(msg)
    if strategy == "none":
        return Search(graph, costs, [])
    if strategy == "chen":
        return Search(graph, costs, [[chen_family(graph, chain)]])
    if strategy == "checkmate":
        return CheckmateSearch(graph, costs, time_limit_s=solver_time.limit_s)
    if strategy == "rotor":
        max_bytes = simulate(graph, baseline_schedule(graph), costs).peak_bytes
        rotor = RotorFamily(
            graph,
            chain,
            costs,
            max_bytes=max_bytes,
            solver_time=solver_time,
            solved=solved,
            is_all_or_nothing=True,
        )
        return Search(graph, costs, [rotor.makers()], num_unproved=rotor.solver.num_unproved)
    return local_search(
        graph, chain, costs, certificate=certificate, solver_time=solver_time, solved=solved
    )


def local_search(
    graph: Graph,
    chain: BlockChain,
    costs: Costs,
    *,
    certificate: LowerBound,
    solver_time: SolverTime,
    solved: SolvedBlocks | None = None,
) -> LocalSearch:
    """The search of "rockmate"; arguments as for `make_search`."""
    max_bytes = simulate(graph, baseline_schedule(graph), costs).peak_bytes
    backward = memory_minimizing_order(graph, costs)
    if backward is not None:
        chain = chain.with_backward_as_in(backward)
    proposals = SolverWarmStarts(
        graph,
        chain,
        costs,
        certificate,
        max_bytes=max_bytes,
        solver_time=solver_time,
        solved=solved,
    )
    return LocalSearch(graph, costs, proposals, backward=backward)
