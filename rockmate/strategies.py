"""Ways of planning by name, each as a search over its own families of schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rockmate.costs import Costs, unit_times
from rockmate.graph import Graph
from rockmate.options import SolvedBlocks
from rockmate.partition import BlockChain
from rockmate.proposals import SeveralLevels, one_level, square_root
from rockmate.schedule import no_recomputation
from rockmate.search import Search, Searcher
from rockmate.simulate import simulate
from rockmate.solver_time import SolverTime
from rockmate.whole_graph import WholeGraphSearch

_SMALLEST = 4  # schedules among which the smallest peak is sought, of the tight end of a table that counts ops
_FEW_SLOTS = 50  # of such a table: only its tight end matters
_ONE_SLOT = 1  # of a table of which only the smallest peak is asked for, which is exact at any resolution
STRATEGIES = ("none", "chen", "rotor", "checkmate", "rockmate")


def make_search(
    strategy: str,
    graph: Graph,
    chain: BlockChain,
    costs: Costs,
    *,
    solver_time: SolverTime,
    bound_ms: Callable[[int], float] | None = None,
    solved: SolvedBlocks | None = None,
) -> Searcher:
    """Solves what `strategy` needs once for all budgets.

    Args:
        strategy: "none" recomputes nothing; "chen" keeps one boundary in every sqrt(n) blocks; "rotor" chooses by dynamic program
            which blocks save everything and which run again as a whole; "checkmate" solves the whole graph as one program, for
            small models; "rockmate" gives blocks and spans of blocks several options,
            adds the whole graph's knapsack, and improves the result run by run.
        graph: ops and storages.
        chain: its blocks.
        costs: of its ops.
        solver_time: what its solves share; of "checkmate" each budget may take all of it.
        bound_ms: a time that no schedule of so many bytes beats; where given, "rockmate" stops searching near it.
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
        return Search(graph, costs, [[square_root(graph, chain)]])
    if strategy == "checkmate":
        return WholeGraphSearch(graph, costs, time_limit_s=solver_time.limit_s)
    max_bytes = simulate(graph, no_recomputation(graph), costs).peak_bytes
    solved = SolvedBlocks() if solved is None else solved

    def several_levels(costs: Costs, **options: Any) -> SeveralLevels:
        return SeveralLevels(graph, chain, costs, max_bytes=max_bytes, solver_time=solver_time, solved=solved, **options)

    if strategy == "rotor":
        rotor = several_levels(costs, is_all_or_nothing=True)
        return Search(graph, costs, [rotor.makers()], num_unproved=rotor.solver.num_unproved)
    timed = several_levels(costs)
    counted = several_levels(unit_times(costs), max_slots=_FEW_SLOTS)
    whole_blocks = several_levels(unit_times(costs), max_slots=_ONE_SLOT, is_all_or_nothing=True)
    families = [one_level(graph, chain, timed.solver), timed.makers()]
    smallest = [*counted.makers()[:_SMALLEST], *whole_blocks.makers()[:1]]
    num_unproved = timed.solver.num_unproved + counted.solver.num_unproved
    return Search(graph, costs, families, smallest=smallest, improves=True, bound_ms=bound_ms, num_unproved=num_unproved)
