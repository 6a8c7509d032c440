"""Ops of the forward -> the knapsack of what to save and what to recompute, as numbers for `checkmate`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from checkmate import Knapsack
from checkmate import Op as KnapsackOp
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Op, Phase, Storage, state_bytes


def knapsack_of(
    ops: Sequence[Op],
    readers: Iterable[Op],
    costs: Costs,
    *,
    at_hand: Collection[Storage] = (),
    kept: Collection[Storage] = (),
    with_states: bool = False,
) -> tuple[Knapsack, list[Storage]]:
    """The problem of having at hand what `readers` read, where each value that `ops` make is saved or made again.

    Late ops run in the backward for the first time, so running them costs nothing more.

    Args:
        ops: forward and late ops in order.
        readers: ops whose reads are required.
        costs: of each op.
        at_hand: storages that are there in any case and take no bytes that this problem counts.
        kept: storages that are saved in any case.
        with_states: what an op keeps of its first run to run again counts as one more value, which it reads and which cannot be made again.

    Returns:
        The problem, and the storage that each of its values stands for; values beyond those are states.
    """
    values = [storage for op in ops for storage in op.writes if storage not in at_hand]
    number = {storage: index for index, storage in enumerate(values)}
    value_bytes = [storage.num_bytes for storage in values]
    numbered: list[KnapsackOp] = []
    for op in ops:
        inputs, outputs = (
            tuple(number[s] for s in storages if s in number) for storages in (op.reads, op.writes)
        )
        if not outputs:
            continue
        is_late = op.phase is Phase.LATE
        is_recomputable = is_late or op.recompute_target is not None
        if with_states and is_recomputable and not is_late and state_bytes(op):
            inputs += (len(value_bytes),)
            numbered.append(
                KnapsackOp(time_ms=0.0, inputs=(), outputs=inputs[-1:], recomputable=False)
            )
            value_bytes.append(state_bytes(op))
        time_ms = 0.0 if is_late else costs.recompute[op.index].time_ms
        numbered.append(
            KnapsackOp(
                time_ms=time_ms, inputs=inputs, outputs=outputs, recomputable=is_recomputable
            )
        )
    problem = Knapsack(
        ops=tuple(numbered),
        value_bytes=tuple(value_bytes),
        required=frozenset(
            number[storage] for op in readers for storage in op.reads if storage in number
        ),
        forced=frozenset(number[storage] for storage in kept if storage in number),
    )
    return problem, values
