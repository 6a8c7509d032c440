"""Blocks and what the solvers chose for them -> the order in which ops run.

Recomputation stands as late as possible: right before the first backward op that reads its result. Values that only the backward
needs (late ops) are treated in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from rockmate.graph.blocks import Block, BlockChain
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.schedule.schedule import Schedule, finish
from rotor import Backward, ForwardOnly
from rotor import Sequence as RotorSequence


def backward_steps(block: Block, available: Collection[Storage]) -> list[int]:
    """The backward of a block with everything recomputed that is needed and not available.

    Args:
        block: whose backward.
        available: storages of the forward that are at hand when it starts.

    Returns:
        Op indices in running order.
    """
    at_hand = set(available)
    steps: list[int] = []
    for op in block.backward:
        if op.phase is Phase.BACKWARD:
            for storage in op.reads:
                if storage not in at_hand and storage.producer is not None:
                    _make(storage, at_hand, steps)
            steps.append(op.index)
            at_hand.update(op.writes)
    return steps


def _make(storage: Storage, at_hand: set[Storage], steps: list[int]) -> None:
    """Appends what it takes to have `storage`, dependencies first; a stack stands for recursion."""
    pending = [storage]
    while pending:
        producer = pending[-1].producer
        if pending[-1] in at_hand or producer is None or producer.phase is Phase.BACKWARD:
            pending.pop()
            continue
        missing = [
            s
            for s in producer.reads
            if s not in at_hand and s.producer and s.producer.phase is not Phase.BACKWARD
        ]
        if missing:
            pending.extend(reversed(missing))
            continue
        steps.append(producer.index)
        at_hand.update(producer.writes)
        pending.pop()


def lower_saved(graph: Graph, chain: BlockChain, saved: Collection[Storage]) -> Schedule:
    """The schedule that keeps `saved` (and what the user holds) and recomputes the rest once, as late as possible."""
    whole = chain.span(0, len(chain.blocks) - 1)
    available = {*saved, *_outputs(graph.ops)}
    return finish(graph, [op.index for op in whole.forward], backward_steps(whole, available))


def lower_sequence(
    graph: Graph,
    chain: BlockChain,
    sequence: RotorSequence,
    saved_of: Callable[[int, int, int], Collection[Storage]],
) -> Schedule:
    """The schedule of a rotor sequence.

    Args:
        graph: ops and storages.
        chain: the blocks that the sequence's stages stand for.
        sequence: rotor's answer.
        saved_of: (first, last, option) -> storages of that span which the option saves.
    """
    steps: list[int] = []
    num_forward: int | None = None
    ran: set[Op] = set()
    uncounted = {*chain.carried, *_outputs(graph.ops)}
    for step in sequence.steps:
        if isinstance(step, Backward):
            num_forward = len(steps) if num_forward is None else num_forward
            block = chain.span(step.first, step.last)
            available = {*uncounted, *saved_of(step.first, step.last, step.option)}
            steps += backward_steps(block, available | ({block.input} if block.input else set()))
            continue
        first, last = (
            (step.stage, step.stage) if isinstance(step, ForwardOnly) else (step.first, step.last)
        )
        for op in chain.span(first, last).forward:
            if op not in ran or not all(storage in uncounted for storage in op.writes):
                steps.append(op.index)
                ran.add(op)
    assert num_forward is not None
    return finish(graph, steps[:num_forward], steps[num_forward:])


def _outputs(ops: Iterable[Op]) -> list[Storage]:
    return [storage for op in ops for storage in op.writes if storage.is_output]
