"""The options of a block: the ways to run it, by the bytes that it saves.

To choose the values to save and to recompute is a precedence-constrained knapsack. `checkmate`
gives the answers on its convex hull. Each is then simulated by itself for its peaks. Equal blocks
are solved once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from checkmate import convex_hull
from rockmate.bound.knapsack import knapsack_of
from rockmate.costs.cost import Costs
from rockmate.graph.blocks import Block, BlockChain, kind_of, storages_of, wiring_of
from rockmate.graph.ir import Graph, Phase, Storage
from rockmate.graph.marking import forced_recomputations
from rockmate.planning.lowering import backward_steps
from rockmate.schedule.simulate import PartSimulation, simulate_part


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOption:
    """One way to run a block.

    Attributes:
        saved: positions in `storages_of(block)` of the values saved from its forward to its
            backward, without the output boundary.
        saved_bytes: the bytes of the saved values, with the output boundary and random states.
        forward: time of the forward that saves them, and its peak beside the input.
        backward: time of the backward with its recomputation, and its peak beside the input,
            gradients included.
    """

    saved: tuple[int, ...]
    saved_bytes: int
    forward: PartSimulation
    backward: PartSimulation


class SolvedBlocks:
    """The options of solved blocks by structure and costs; graphs with equal blocks share them.

    Attributes:
        by_key: the options by the key of a block.
    """

    def __init__(self) -> None:
        self.by_key: dict[Hashable, tuple[BlockOption, ...]] = {}
        self._numbers: dict[Hashable, int] = {}

    def number_of(self, kind: Hashable) -> int:
        """A number that replaces `kind` in keys: a kind of op is long, and many blocks name it."""
        return self._numbers.setdefault(kind, len(self._numbers))


@dataclass(frozen=True, slots=True)
class Solving:
    """A graph in blocks, and what all solves about it share.

    Attributes:
        graph: ops and storages.
        chain: its blocks.
        costs: of its ops.
        solved: options of blocks of graphs of the same step; those that are solved are added.
    """

    graph: Graph
    chain: BlockChain
    costs: Costs
    solved: SolvedBlocks = field(default_factory=SolvedBlocks)


class OptionSolver:
    """Computes the options of blocks, each distinct block once.

    Args:
        solving: the graph and its blocks.
        max_options: largest number of options of a block.

    Attributes:
        solved: options of distinct blocks.
    """

    def __init__(self, solving: Solving, *, max_options: int) -> None:
        graph, chain, costs = solving.graph, solving.chain, solving.costs
        self.graph, self.costs, self.max_options = graph, costs, max_options
        self.solved = solving.solved
        self._kinds = [
            self.solved.number_of((kind_of(op, chain.carried), first, recompute))
            for op, first, recompute in zip(graph.ops, costs.first, costs.recompute, strict=True)
        ]
        self._uncounted = chain.carried | {s for op in graph.ops for s in op.writes if s.is_output}

    def options(self, block: Block) -> tuple[BlockOption, ...]:
        """The options of a block, from the most saved bytes to the least."""
        kinds = tuple(self._kinds[op.index] for op in (*block.forward, *block.backward))
        key = kinds, wiring_of(block), self.max_options
        if key not in self.solved.by_key:
            self.solved.by_key[key] = self._solve(block)
        return self.solved.by_key[key]

    def _saved_sets(self, block: Block) -> list[set[Storage]]:
        kept = {block.output} if block.output else set()
        forced = forced_recomputations(block.forward, block.backward)
        problem, values = knapsack_of(
            block.forward,
            block.backward,
            self.costs,
            available=self._uncounted,
            kept=kept,
            recomputed=forced.difference(*({s.producer} for s in kept)),
        )
        return [
            {
                values[value]
                for value in solution.saved
                if values[value] in kept or not values[value].must_recompute
            }
            for solution in convex_hull(problem, max_points=self.max_options)
        ]

    def forward_only(self, block: Block) -> PartSimulation:
        """Peak and time of the forward that saves only the output boundary."""
        after = {block.output} if block.output else set()
        part = simulate_part(
            self.graph,
            _indices(block),
            self.costs,
            before=(),
            after=after,
            uncounted=self._uncounted,
        )
        # The output counts even if the user or an earlier block holds it.
        output_bytes = block.output.num_bytes if block.output else 0
        return PartSimulation(peak_bytes=max(part.peak_bytes, output_bytes), time_ms=part.time_ms)

    def _solve(self, block: Block) -> tuple[BlockOption, ...]:
        sets = self._saved_sets(block)
        position = {storage: index for index, storage in enumerate(storages_of(block))}
        gradients = self._gradients(block)
        return tuple(self._measure(block, saved, position, gradients) for saved in sets)

    def _gradients(self, block: Block) -> tuple[set[Storage], set[Storage]]:
        """The gradients that the block's backward reads from outside, and those it leaves live."""
        own = set(block.backward)
        made = {storage for op in block.backward for storage in op.writes}
        given = {s for op in block.backward for s in op.reads if s not in made and _is_gradient(s)}
        left = {
            s
            for s in made
            if any(reader not in own for reader in self.graph.readers.get(s, ()))
            or s.is_kept_to_end
        }
        return given, left

    def _measure(
        self,
        block: Block,
        saved: set[Storage],
        position: dict[Storage, int],
        gradients: tuple[set[Storage], set[Storage]],
    ) -> BlockOption:
        boundary = {block.output} if block.output else set()
        kept = saved | boundary
        forward = simulate_part(
            self.graph,
            _indices(block),
            self.costs,
            before=(),
            after=kept,
            uncounted=self._uncounted,
        )
        attach_input = {block.input} if block.input else set()
        steps = backward_steps(block, {*saved, *boundary, *attach_input, *self._uncounted})
        given, left = gradients
        backward = simulate_part(
            self.graph, steps, self.costs, before=kept | given, after=left, recompute=True
        )
        states = sum(
            self.graph.ops[index].recompute_state_bytes
            for index in steps
            if self.graph.ops[index].phase is Phase.FORWARD
        )
        saved_bytes = sum(storage.num_bytes for storage in kept) + states
        return BlockOption(
            saved=tuple(sorted(position[storage] for storage in saved)),
            saved_bytes=saved_bytes,
            forward=PartSimulation(
                peak_bytes=max(forward.peak_bytes + states, saved_bytes), time_ms=forward.time_ms
            ),
            backward=PartSimulation(
                peak_bytes=backward.peak_bytes + states, time_ms=backward.time_ms
            ),
        )


def storages_at(block: Block, positions: Sequence[int]) -> set[Storage]:
    """The storages of a block at these positions of `storages_of`."""
    storages = storages_of(block)
    return {storages[position] for position in positions}


def _indices(block: Block) -> list[int]:
    return [op.index for op in block.forward]


def _is_gradient(storage: Storage) -> bool:
    return storage.producer is not None and storage.producer.phase is Phase.BACKWARD
