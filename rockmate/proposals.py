"""What the solvers propose for a graph: two families of schedules, each in order of growing solver budget.

* *one level*: save a set of values, recompute everything else once, as late as possible. The sets are the whole-graph knapsack's
  Pareto set, so no set of the same bytes recomputes less. What it cannot do is recompute a value twice, and it does not see peaks;
* *several levels*: the sequences of rotor's table over the chain of blocks, spans of blocks included, each with its options.

Nothing is lowered before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rockmate.costs import Costs
from rockmate.graph import Graph, Storage
from rockmate.lowering import lower_saved, lower_sequence
from rockmate.options import OptionSolver, storages_at
from rockmate.partition import BlockChain
from rockmate.schedule import Schedule
from rotor import Chain, Option, Stage, Table, solve_table

_SPANS = (1, 2, 4)  # in blocks: half a layer, a layer and two layers of a transformer
_MAX_OPTIONS = 16  # of a span
_MAX_SAVED_SETS = 96  # of the whole graph
_TABLE_CELLS = 5_200_000  # stages x stages x slots: bounds the table's time

ScheduleMaker = Callable[[], Schedule]


class Proposals:
    """The solvers' answers for one cost table."""

    def __init__(self, graph: Graph, chain: BlockChain, costs: Costs, *, max_bytes: int, time_limit_s: float) -> None:
        """Solves the blocks and the table.

        Args:
            graph: ops and storages.
            chain: its blocks.
            costs: of its ops.
            max_bytes: the largest budget that matters.
            time_limit_s: cap on each call of a solver.
        """
        self.graph = graph
        self.chain = chain
        self.solver = OptionSolver(graph, chain, costs, max_options=_MAX_OPTIONS, time_limit_s=time_limit_s)
        self.rotor_chain = self._rotor_chain()
        self.table = self._solve_table(max_bytes)

    def one_level(self) -> list[ScheduleMaker]:
        """Schedules that recompute at most once."""
        whole = self.chain.span(0, len(self.chain.blocks) - 1)
        sets = self.solver.saved_sets(whole, _MAX_SAVED_SETS)
        return [partial(lower_saved, self.graph, self.chain, saved) for saved in reversed(sets)]

    def several_levels(self) -> list[ScheduleMaker]:
        """Schedules of the table, one for each budget at which its least time drops."""
        return [partial(self._from_table, budget_bytes) for budget_bytes, _ in self.table.breakpoints()]

    def _from_table(self, table_budget_bytes: int) -> Schedule:
        return lower_sequence(self.graph, self.chain, self.table.sequence(table_budget_bytes), self._saved_of)

    def _saved_of(self, first: int, last: int, option: int) -> set[Storage]:
        block = self.chain.span(first, last)
        return storages_at(block, self.solver.options(block)[option].saved)

    def _rotor_chain(self) -> Chain:
        blocks = self.chain.blocks
        stages = []
        for block in blocks:
            forward = self.solver.forward_only(block)
            stages.append(
                Stage(
                    input_bytes=block.input.num_bytes if block.input else 0,
                    output_gradient_bytes=block.output.num_bytes if block.output else 0,
                    forward_ms=forward.time_ms,
                    forward_peak_bytes=forward.peak_bytes,
                )
            )
        spans = {}
        for length in _SPANS:
            for first in range(len(blocks) - length + 1):
                last = first + length - 1
                options = self.solver.options(self.chain.span(first, last))
                spans[first, last] = tuple(
                    Option(
                        saved_bytes=option.saved_bytes,
                        forward_peak_bytes=option.forward.peak_bytes,
                        backward_peak_bytes=option.backward.peak_bytes,
                        forward_ms=option.forward.time_ms,
                        backward_ms=option.backward.time_ms,
                    )
                    for option in options
                )
        return Chain(stages=tuple(stages), spans=spans)

    def _solve_table(self, max_bytes: int) -> Table:
        num_stages = len(self.rotor_chain.stages)
        slots = max(200, min(2000, _TABLE_CELLS // num_stages**2))
        return solve_table(self.rotor_chain, max(max_bytes, slots), num_slots=slots)
