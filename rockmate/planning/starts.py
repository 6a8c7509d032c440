"""What the solvers propose for a graph, each solved when it is first asked for: few budgets take them all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.solver_time import SolverTime
from rockmate.costs.cost import Costs, unit_times
from rockmate.graph.blocks import BlockChain
from rockmate.graph.ir import Graph
from rockmate.planning.block_options import SolvedBlocks
from rockmate.planning.family import ScheduleMaker
from rockmate.planning.knapsack_family import KnapsackFamily
from rockmate.planning.rotor_family import RotorFamily
from rockmate.schedule.schedule import Schedule

_SMALLEST = 4  # schedules among which the smallest peak is sought, of the tight end of a table that counts ops
_FEW_SLOTS = 50  # of such a table: only its tight end matters
_SHORT_SPANS = (
    1,
    2,
)  # in blocks, of such a table: longer ones take as long as all others, and evictions then reach as low without
_ONE_SLOT = (
    1  # of a table of which only the smallest peak is asked for, which is exact at any resolution
)


class SolverWarmStarts:
    """Schedules of one level and of several, by the times of ops and by their number."""

    def __init__(
        self,
        graph: Graph,
        chain: BlockChain,
        costs: Costs,
        certificate: LowerBound,
        *,
        max_bytes: int,
        solver_time: SolverTime,
        solved: SolvedBlocks | None = None,
    ) -> None:
        """Takes what the solvers need.

        Args:
            graph: ops and storages.
            chain: its blocks.
            costs: of its ops.
            certificate: its bound.
            max_bytes: the largest budget that matters.
            solver_time: what the solves share.
            solved: blocks that need not be solved again.
        """
        self._graph, self._chain, self._costs, self._certificate = graph, chain, costs, certificate
        self._max_bytes, self._solver_time = max_bytes, solver_time
        self._solved = SolvedBlocks() if solved is None else solved
        self._tables: list[RotorFamily] = []

    @property
    def num_unproved(self) -> int:
        """How many solves so far have stopped at their time limit."""
        one_level = self._one_level.num_unproved if "_one_level" in self.__dict__ else 0
        return (
            self._certificate.num_cut_short
            + one_level
            + sum(table.solver.num_unproved for table in self._tables)
        )

    def bound_ms(self, budget_bytes: int) -> float:
        """A time that no schedule of so many bytes beats."""
        return self._certificate.bound_ms(budget_bytes)

    def from_relaxation(self, budget_bytes: int) -> Schedule | None:
        """A schedule of the bound's own time, whose peak may exceed the budget; None if there is none."""
        kept = self._certificate.saved_values_within(budget_bytes)
        return None if kept is None else self._one_level.keeping(kept)

    def saving(self, max_saved_bytes: int) -> Schedule | None:
        """The fastest schedule that saves at most so many bytes and recomputes the rest once; None if there is none."""
        return self._one_level.saving(max_saved_bytes)

    def several_levels(self) -> Sequence[ScheduleMaker]:
        """Schedules that may recompute more than once, in order of growing solver budget."""
        return self._table(self._costs).makers()

    def smallest(self) -> Sequence[ScheduleMaker]:
        """The tightest of a table that counts ops, and of one where blocks are all or nothing, so that nothing fits Rotor alone."""
        counted = unit_times(self._costs)
        tightest = self._table(counted, max_slots=_FEW_SLOTS, spans=_SHORT_SPANS).makers()[
            :_SMALLEST
        ]
        return [
            *tightest,
            *self._table(counted, max_slots=_ONE_SLOT, is_all_or_nothing=True).makers()[:1],
        ]

    @cached_property
    def _one_level(self) -> KnapsackFamily:
        return KnapsackFamily(self._graph, self._chain, self._costs, solver_time=self._solver_time)

    def _table(self, costs: Costs, **options: Any) -> RotorFamily:
        table = RotorFamily(
            self._graph,
            self._chain,
            costs,
            max_bytes=self._max_bytes,
            solver_time=self._solver_time,
            solved=self._solved,
            **options,
        )
        self._tables.append(table)
        return table
