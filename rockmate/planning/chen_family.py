"""The schedule of Chen et al.: one boundary saved in every sqrt(n) blocks, the rest recomputed.

"Training Deep Nets with Sublinear Memory Cost", 2016. It has no budget, and equal segments whatever
the sizes of the blocks.
"""

from __future__ import annotations

from functools import partial
from math import isqrt

from rockmate.graph.blocks import Block, BlockChain, storages_of
from rockmate.graph.ir import Graph, Storage
from rockmate.planning.family import ScheduleMaker
from rockmate.planning.lowering import lower_sequence
from rotor import Backward, ForwardKeep, ForwardOnly, Step
from rotor import Sequence as RotorSequence


def chen_family(graph: Graph, chain: BlockChain) -> ScheduleMaker:
    """The schedule that saves the input of each segment and recomputes the segment."""
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
