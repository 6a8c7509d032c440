"""The search of the strategies to compare with: the fastest member of a family, as it is.

Solvers propose schedules, the simulator judges each by its peak. Nothing is repaired or refined.
`Searcher` is the interface of all searches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isqrt
from typing import Protocol

from rockmate.costs.cost import Costs
from rockmate.graph.blocks import Block, BlockChain, storages_of
from rockmate.graph.ir import Graph, Storage
from rockmate.planning.candidate import (
    Candidate,
    Family,
    ScheduleMaker,
    by_peak,
    evaluate,
    feasible,
)
from rockmate.planning.lowering import lower_sequence
from rockmate.schedule.schedule import baseline_schedule
from rotor import Backward, ForwardKeep, ForwardOnly, Step
from rotor import Sequence as RotorSequence


class Searcher(Protocol):
    """A search for the fastest schedule within any budget."""

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest schedule found with a simulated peak of at most `budget_bytes`.

        None if the budget is below the minimum.
        """
        ...

    def minimum(self) -> Candidate:
        """The candidate with the smallest peak."""
        ...


class FamilySearch:
    """The choice among the members of families, none of them changed.

    Args:
        graph: ops and storages.
        costs: of its ops.
        families: schedules, each family in order of growing solver budget.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        families: Sequence[Sequence[ScheduleMaker]],
    ) -> None:
        simulated = partial(evaluate, graph, costs=costs)
        self._families = [Family(makers, simulated) for makers in families]
        self._grid = [
            simulated(baseline_schedule(graph)),
            *(candidate for family in self._families for candidate in family.grid()),
        ]

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """See `Searcher`."""
        if budget_bytes < self.minimum().peak_bytes:
            return None
        near_budget = [
            candidate for family in self._families for candidate in family.near_budget(budget_bytes)
        ]
        return feasible([*self._grid, *near_budget], budget_bytes)[0]

    def minimum(self) -> Candidate:
        """See `Searcher`."""
        return min(self._grid, key=by_peak)


def chen_family(graph: Graph, chain: BlockChain) -> ScheduleMaker:
    """The schedule of Chen et al.: saves one boundary in every sqrt(n) blocks, recomputes the rest.

    "Training Deep Nets with Sublinear Memory Cost", 2016. It has no budget, and equal segments
    whatever the sizes of the blocks.
    """
    num_blocks = len(chain.blocks)
    length = isqrt(num_blocks - 1) + 1
    firsts = list(range(0, num_blocks, length))
    steps: list[Step] = [ForwardOnly(stage) for stage in range(firsts[-1])]
    for first in reversed(firsts):
        segment = range(first, min(first + length, num_blocks))
        steps += [ForwardKeep(block, block, 0) for block in segment]
        steps += [Backward(block, block, 0) for block in reversed(segment)]
    return partial(
        lower_sequence,
        graph,
        chain,
        RotorSequence(tuple(steps)),
        lambda first, last, _: _all_of(chain.span(first, last)),
    )


def _all_of(block: Block) -> set[Storage]:
    """All values that a block's forward could save for its backward."""
    made = {storage for op in block.forward for storage in op.writes}
    return made.intersection(storages_of(block))
