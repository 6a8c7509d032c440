"""Ops of the forward -> the knapsack of what to save and what to recompute, as numbers for `checkmate`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from checkmate import Knapsack
from checkmate import Op as KnapsackOp
from rockmate.costs import Costs
from rockmate.graph import Op, Phase, Storage


def knapsack_of(
    ops: Sequence[Op], readers: Iterable[Op], costs: Costs, *, at_hand: Collection[Storage] = (), kept: Collection[Storage] = ()
) -> tuple[Knapsack, list[Storage]]:
    """The problem of having at hand what `readers` read, where each value that `ops` make is saved or made again.

    Late ops run in the backward for the first time, so running them costs nothing more.

    Args:
        ops: forward and late ops in order.
        readers: ops whose reads are required.
        costs: of each op.
        at_hand: storages that are there in any case and take no bytes that this problem counts.
        kept: storages that are saved in any case.

    Returns:
        The problem, and the storage that each of its values stands for.
    """
    values = [storage for op in ops for storage in op.writes if storage not in at_hand]
    number = {storage: index for index, storage in enumerate(values)}
    numbered = [
        KnapsackOp(
            time_ms=0.0 if op.phase is Phase.LATE else costs.again[op.index].time_ms,
            inputs=tuple(number[s] for s in op.reads if s in number),
            outputs=tuple(number[s] for s in op.writes if s in number),
            recomputable=op.phase is Phase.LATE or op.recompute_target is not None,
        )
        for op in ops
    ]
    problem = Knapsack(
        ops=tuple(op for op in numbered if op.outputs),
        value_bytes=tuple(storage.num_bytes for storage in values),
        required=frozenset(number[storage] for op in readers for storage in op.reads if storage in number),
        forced=frozenset(number[storage] for storage in kept if storage in number),
    )
    return problem, values
