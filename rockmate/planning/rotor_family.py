"""Schedules of several levels: the sequences of rotor's table over the chain of blocks, spans of blocks included, each with its options.

Nothing is lowered before it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rockmate.bound.solver_time import SolverTime
from rockmate.costs.cost import Costs
from rockmate.graph.blocks import BlockChain
from rockmate.graph.ir import Graph, Storage
from rockmate.planning.block_options import BlockOption, OptionSolver, SolvedBlocks, storages_at
from rockmate.planning.family import ScheduleMaker
from rockmate.planning.lowering import lower_sequence
from rockmate.schedule.schedule import Schedule
from rotor import Chain, Option, Stage, Table, solve_table

SPANS = (1, 2, 4)  # in blocks: half a layer, a layer and two layers of a transformer
_MAX_OPTIONS = 16  # of a span
_MAX_SLOWDOWN = (
    4.0  # against the fastest of the table; slower schedules are of no use, and very long
)
_TABLE_CELLS = 2_000_000  # stages x stages x slots: bounds the table's time


class RotorFamily:
    """Rotor's table over the blocks and their options."""

    def __init__(
        self,
        graph: Graph,
        chain: BlockChain,
        costs: Costs,
        *,
        max_bytes: int,
        solver_time: SolverTime,
        max_slots: int = 500,
        solved: SolvedBlocks | None = None,
        spans: Sequence[int] = SPANS,
        is_all_or_nothing: bool = False,
    ) -> None:
        """Solves the blocks and the table.

        Args:
            graph: ops and storages.
            chain: its blocks.
            costs: of its ops.
            max_bytes: the largest budget that matters.
            solver_time: what the solves of its blocks share.
            max_slots: bounds the table's resolution; its smallest peak is exact at any.
            solved: blocks that need not be solved again.
            spans: lengths, in blocks, of what is given options.
            is_all_or_nothing: each block saves everything or runs again as a whole: Rotor without options or spans.
        """
        self.graph = graph
        self.chain = chain
        self.solver = OptionSolver(
            graph, chain, costs, max_options=_MAX_OPTIONS, solver_time=solver_time, solved=solved
        )
        self._spans = (1,) if is_all_or_nothing else tuple(spans)
        self._num_options = 1 if is_all_or_nothing else _MAX_OPTIONS
        self._options: dict[tuple[int, int], Sequence[BlockOption]] = {}
        self.rotor_chain = self._rotor_chain()
        self.table = self._solve_table(max_bytes, max_slots)

    def makers(self) -> list[ScheduleMaker]:
        """Schedules, one for each table budget at which the least time drops; none that takes several times the least."""
        points = self.table.breakpoints()
        least_ms = min((time_ms for _, time_ms in points), default=0.0)
        return [
            partial(self._from_table, budget_bytes)
            for budget_bytes, time_ms in points
            if time_ms <= _MAX_SLOWDOWN * least_ms
        ]

    def _from_table(self, table_budget_bytes: int) -> Schedule:
        return lower_sequence(
            self.graph, self.chain, self.table.sequence(table_budget_bytes), self._saved_of
        )

    def _saved_of(self, first: int, last: int, option: int) -> set[Storage]:
        return storages_at(self.chain.span(first, last), self.options_of(first, last)[option].saved)

    def options_of(self, first: int, last: int) -> Sequence[BlockOption]:
        """The options of blocks `first` to `last` as one, from the one that saves most."""
        if (first, last) not in self._options:
            self._options[first, last] = self.solver.options(self.chain.span(first, last))[
                : self._num_options
            ]
        return self._options[first, last]

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
        for length in self._spans:
            for first in range(len(blocks) - length + 1):
                last = first + length - 1
                spans[first, last] = tuple(
                    Option(
                        saved_bytes=option.saved_bytes,
                        forward_peak_bytes=option.forward.peak_bytes,
                        backward_peak_bytes=option.backward.peak_bytes,
                        forward_ms=option.forward.time_ms,
                        backward_ms=option.backward.time_ms,
                    )
                    for option in self.options_of(first, last)
                )
        return Chain(stages=tuple(stages), spans=spans)

    def _solve_table(self, max_bytes: int, max_slots: int) -> Table:
        num_stages = len(self.rotor_chain.stages)
        slots = min(max_slots, max(200, _TABLE_CELLS // num_stages**2))
        return solve_table(self.rotor_chain, max(max_bytes, slots), num_slots=slots)
