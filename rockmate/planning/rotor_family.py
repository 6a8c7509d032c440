"""Schedules that may recompute a value several times: sequences of rotor's table over the blocks.

Rockmate's method (Zhao et al., ICML 2023): each block, and each span of neighbouring blocks, has
several options to save or recompute its values (`block_options`). Rotor's dynamic program picks the
options and the boundaries to save. A sequence is lowered to a schedule on demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rockmate.graph.ir import Storage
from rockmate.planning.block_options import BlockOption, OptionSolver, Solving, storages_at
from rockmate.planning.candidate import ScheduleMaker
from rockmate.planning.lowering import lower_sequence
from rockmate.schedule.schedule import Schedule
from rotor import Chain, Option, Stage, Table, solve_table

# Lengths of spans, in blocks: half a layer, a layer and two layers of a transformer.
SPANS = (1, 2, 4)
# Largest number of options of a span.
_MAX_OPTIONS = 16
# Largest ratio of a schedule's time to the least of its table. Slower ones are long: the smallest
# peak of GPT-2 with 96 layers would be 2 % smaller, and its step would take 18 times as long.
_MAX_SLOWDOWN = 4.0
# Limit on stages x stages x slots, which bounds the time to fill a table.
_TABLE_CELLS = 2_000_000
# Resolution that this limit never goes below.
_MIN_SLOTS = 200


class RotorFamily:
    """Rotor's table over the blocks of a graph and their options.

    Args:
        solving: the graph and its blocks.
        max_bytes: the largest budget that matters.
        max_slots: limit on the table's resolution. Its smallest peak is exact at any resolution.
        spans: lengths, in blocks, of the spans that have options.
        is_all_or_nothing: each block saves everything or is recomputed as a whole: Rotor without
            options or spans.
    """

    def __init__(
        self,
        solving: Solving,
        *,
        max_bytes: int,
        max_slots: int = 500,
        spans: Sequence[int] = SPANS,
        is_all_or_nothing: bool = False,
    ) -> None:
        self.graph, self.chain = solving.graph, solving.chain
        self.solver = OptionSolver(solving, max_options=_MAX_OPTIONS)
        self._spans = (1,) if is_all_or_nothing else tuple(spans)
        self._num_options = 1 if is_all_or_nothing else _MAX_OPTIONS
        self._options: dict[tuple[int, int], Sequence[BlockOption]] = {}
        self.rotor_chain = self._rotor_chain()
        self.table = self._solve_table(max_bytes, max_slots)

    def makers(self) -> list[ScheduleMaker]:
        """A schedule for each budget at which the least time drops, up to `_MAX_SLOWDOWN`."""
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
        """The options of the span of blocks `first` to `last`, the one that saves most first."""
        if (first, last) not in self._options:
            options = self.solver.options(self.chain.span(first, last))
            self._options[first, last] = options[: self._num_options]
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
        slots = min(max_slots, max(_MIN_SLOTS, _TABLE_CELLS // num_stages**2))
        return solve_table(self.rotor_chain, max(max_bytes, slots), num_slots=slots)
