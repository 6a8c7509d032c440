"""Lowers a solver's answer over blocks to a schedule: the order in which ops run.

A recomputation stands as late as possible: right before the first backward op that reads its
result. So does a late op, which only the backward needs.
"""

from __future__ import annotations

from collections.abc import Collection

from rockmate.graph.blocks import Block, BlockChain
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.graph.marking import forced_recomputations
from rockmate.schedule.schedule import Schedule, finish
from rotor import Sequence as RotorSequence


def backward_steps(block: Block, available: Collection[Storage]) -> list[int]:
    """The backward of a block with every value recomputed that it reads and that is not available.

    Args:
        block: the block.
        available: storages of the forward that are live when its backward starts.

    Returns:
        Op indices in running order.
    """
    at_hand = set(available)
    steps: list[int] = []
    for op in block.backward:
        if op.phase is Phase.BACKWARD:
            for storage in op.reads:
                if storage not in at_hand and storage.producer is not None:
                    _recompute(storage, at_hand, steps)
            steps.append(op.index)
            at_hand.update(op.writes)
    return steps


def _recompute(storage: Storage, at_hand: set[Storage], steps: list[int]) -> None:
    """Appends the ops that compute `storage`, dependencies first, without recursion."""
    pending = [storage]
    while pending:
        producer = pending[-1].producer
        if pending[-1] in at_hand or producer is None or producer.phase is Phase.BACKWARD:
            pending.pop()
            continue
        computed = [s for s in producer.reads if s.phase not in (None, Phase.BACKWARD)]
        missing = [each for each in computed if each not in at_hand]
        if missing:
            pending.extend(reversed(missing))
            continue
        steps.append(producer.index)
        at_hand.update(producer.writes)
        pending.pop()


def lower_saved(graph: Graph, chain: BlockChain, saved: Collection[Storage]) -> Schedule:
    """The schedule that saves `saved` and the outputs and recomputes all else once, late.

    Values whose op must not run twice are saved in any case.
    """
    whole = chain.whole()
    once = {s for op in whole.forward if op.recompute_target is None for s in op.writes}
    available = {*saved, *once, *(s for s in graph.storages if s.is_output)}
    return finish(graph, [op.index for op in whole.forward], backward_steps(whole, available))


def saved_by(block: Block) -> set[Storage]:
    """The values of a block's forward that its backward reads, without those that marks recompute.

    What these are recomputed from is among them.
    """
    made = {storage for op in block.forward for storage in op.writes}
    forced = forced_recomputations(block.forward, block.backward)
    read = {storage for op in (*block.backward, *forced) for storage in op.reads}
    return {storage for storage in made & read if not storage.must_recompute}


def lower_sequence(graph: Graph, chain: BlockChain, sequence: RotorSequence) -> Schedule:
    """The schedule of a sequence of rotor; each block of the chain is a stage of it."""
    steps: list[int] = []
    num_forward: int | None = None
    ran: set[Op] = set()
    uncounted = {*chain.carried, *(s for s in graph.storages if s.is_output)}
    for step in sequence:
        block = chain.blocks[step.stage]
        if step.kind == "B":
            num_forward = len(steps) if num_forward is None else num_forward
            boundaries = {each for each in (block.input, block.output) if each}
            steps += backward_steps(block, uncounted | saved_by(block) | boundaries)
            continue
        for op in block.forward:
            if op not in ran or not all(storage in uncounted for storage in op.writes):
                steps.append(op.index)
                ran.add(op)
    assert num_forward is not None
    return finish(graph, steps[:num_forward], steps[num_forward:])
