"""Schedules that recompute whole blocks, perhaps several times: sequences of Rotor's table.

Each block saves all that its backward reads, or is recomputed as a whole. Rotor's dynamic program
(Beaumont et al., 2019) picks the boundaries to save. A sequence is lowered to a schedule on demand.
"""

from __future__ import annotations

from collections.abc import Iterator

from rockmate.costs.cost import Costs
from rockmate.graph.blocks import Block, BlockChain
from rockmate.graph.ir import Graph, Phase, Storage
from rockmate.planning.lowering import backward_steps, lower_sequence, saved_by
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import simulate_part
from rotor import Stage, Table

# Largest ratio of a schedule's time to the least of its table. Slower ones are long: the smallest
# peak of GPT-2 with 96 layers would be 2 % smaller, and its step would take 18 times as long.
_MAX_SLOWDOWN = 4.0
# Limit on stages x stages x slots, which bounds the time to fill a table.
_TABLE_CELLS = 2_000_000
# Resolutions of a table: this limit never goes below the first, and never above the second.
_MIN_SLOTS, _MAX_SLOTS = 200, 500


class RotorFamily:
    """Rotor's table over the blocks of a graph.

    Args:
        max_bytes: the largest budget that matters; 0 if the smallest peak alone does.
    """

    def __init__(
        self, graph: Graph, chain: BlockChain, costs: Costs, *, max_bytes: int = 0
    ) -> None:
        self._graph, self._chain, self._costs = graph, chain, costs
        self._uncounted = chain.carried.union(s for s in graph.storages if s.is_output)
        stages = tuple(map(self._stage, chain.blocks))
        slots = max(_MIN_SLOTS, min(_MAX_SLOTS, _TABLE_CELLS // len(stages) ** 2))
        self._table = Table(stages, max(max_bytes, slots), num_slots=slots)

    def schedules(self) -> Iterator[Schedule]:
        """A schedule for each budget at which the least time drops, up to `_MAX_SLOWDOWN`."""
        points = self._table.breakpoints()
        least_ms = min((time_ms for _, time_ms in points), default=0.0)
        for budget_bytes, time_ms in points:
            if time_ms <= _MAX_SLOWDOWN * least_ms:
                sequence = self._table.sequence(budget_bytes)
                yield lower_sequence(self._graph, self._chain, sequence)

    def smallest(self) -> Schedule:
        """The schedule of the table's smallest peak, which takes less to find than the others."""
        return lower_sequence(self._graph, self._chain, self._table.smallest())

    def _stage(self, block: Block) -> Stage:
        """The block as a stage: its times, and its peaks beside its input."""
        graph, costs = self._graph, self._costs
        forward = [op.index for op in block.forward]
        boundary = {block.output} if block.output else set()
        output_bytes = sum(storage.num_bytes for storage in boundary)
        saved = saved_by(block) | boundary
        rerun, kept = (
            simulate_part(graph, forward, costs, before=(), after=after, uncounted=self._uncounted)
            for after in (boundary, saved)
        )
        at_hand = {block.input} if block.input else set()
        steps = backward_steps(block, saved | self._uncounted | at_hand)
        given, left = self._gradients(block)
        backward = simulate_part(
            graph, steps, costs, before=saved | given, after=left, recompute=True
        )
        states_bytes = sum(
            graph.ops[index].recompute_state_bytes
            for index in steps
            if graph.ops[index].phase is Phase.FORWARD
        )
        saved_bytes = sum(storage.num_bytes for storage in saved) + states_bytes
        return Stage(
            input_bytes=block.input.num_bytes if block.input else 0,
            output_gradient_bytes=output_bytes,
            forward_ms=rerun.time_ms,
            # The output counts even if the user or an earlier block holds it.
            forward_peak_bytes=max(rerun.peak_bytes, output_bytes),
            saved_bytes=saved_bytes,
            keep_peak_bytes=max(kept.peak_bytes + states_bytes, saved_bytes),
            backward_ms=backward.time_ms,
            backward_peak_bytes=backward.peak_bytes + states_bytes,
        )

    def _gradients(self, block: Block) -> tuple[set[Storage], set[Storage]]:
        """The gradients that a block's backward reads from outside, and those it leaves live."""
        own = set(block.backward)
        made = {storage for op in block.backward for storage in op.writes}
        read = {s for op in block.backward for s in op.reads if s.phase is Phase.BACKWARD}
        given = read - made
        left = {
            s
            for s in made
            if any(reader not in own for reader in self._graph.readers.get(s, ()))
            or s.is_kept_to_end
        }
        return given, left
