"""The knapsack of saved and recomputed values: from ops to the numbers of `checkmate.Knapsack`.

Some readers need values. Each value that the ops make is either saved, which takes its bytes, or
recomputed, which takes its op's time and needs that op's own inputs on the same terms. Bounds and
block options both state their problem this way. The order of the runs, and memory while they run,
are not part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from checkmate import Knapsack
from checkmate import Op as KnapsackOp
from rockmate.bound.program_point import ProgramPoint
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op, Phase, Storage


def knapsack_of(
    ops: Sequence[Op],
    readers: Iterable[Op],
    costs: Costs,
    *,
    available: Collection[Storage],
    with_states: bool = False,
    free: Collection[Op] = (),
    recomputed: Collection[Op] = (),
) -> tuple[Knapsack, list[Storage]]:
    """The problem of providing all values that `readers` read, and the values of its variables.

    Late ops run in the backward for the first time, so a recomputation of one costs nothing.

    Args:
        ops: forward and late ops in order.
        readers: ops whose reads are required.
        costs: costs of the ops.
        available: storages that are in memory in any case, and whose bytes this problem does not
            count.
        with_states: counts the state that a recomputation replays as one more value. The op reads
            it, and it cannot be recomputed.
        free: ops of the forward whose recomputation is paid for elsewhere, so takes no time here.
        recomputed: ops that are recomputed in any case, at a time that this problem does not count.
            What they make is there, and what they read is required.

    Returns:
        The problem, and the storage behind each of its values; values beyond those are states.
    """
    given = {storage for op in recomputed for storage in op.writes}.union(available)
    values = [storage for op in ops for storage in op.writes if storage not in given]
    number = {storage: index for index, storage in enumerate(values)}
    value_bytes = [storage.num_bytes for storage in values]
    numbered = _numbered_ops(ops, costs, number, value_bytes, free, with_states=with_states)
    required = {value for op in (*readers, *recomputed) for value in _numbers(op.reads, number)}
    problem = Knapsack(
        ops=tuple(numbered), value_bytes=tuple(value_bytes), required=frozenset(required)
    )
    return problem, values


def _numbered_ops(
    ops: Sequence[Op],
    costs: Costs,
    number: Mapping[Storage, int],
    value_bytes: list[int],
    free: Collection[Op],
    *,
    with_states: bool,
) -> list[KnapsackOp]:
    """The ops that make a value of the problem; the bytes of states are added to `value_bytes`."""
    numbered: list[KnapsackOp] = []
    for op in ops:
        inputs, outputs = _numbers(op.reads, number), _numbers(op.writes, number)
        if not outputs:
            continue
        is_late = op.phase is Phase.LATE
        is_recomputable = is_late or op.recompute_target is not None
        if with_states and is_recomputable and not is_late and op.recompute_state_bytes:
            state = (len(value_bytes),)
            inputs += state
            numbered.append(KnapsackOp(time_ms=0.0, inputs=(), outputs=state, recomputable=False))
            value_bytes.append(op.recompute_state_bytes)
        numbered.append(
            KnapsackOp(
                time_ms=0.0 if is_late or op in free else costs.recompute[op.index].time_ms,
                inputs=inputs,
                outputs=outputs,
                recomputable=is_recomputable,
            )
        )
    return numbered


def _numbers(storages: Iterable[Storage], number: Mapping[Storage, int]) -> tuple[int, ...]:
    return tuple(number[storage] for storage in storages if storage in number)


def in_flight_knapsack(
    graph: Graph, costs: Costs, point: ProgramPoint, backward: Sequence[Op], forced: Collection[Op]
) -> tuple[Knapsack, list[Storage]]:
    """The problem of one point with several forwards in flight; see `knapsack_of`.

    While one step runs, the saved values of the k - 1 others are in memory. So a value that is
    saved by the forward counts k - 1 times at every point of the step, and once more at a point
    before its last read. The problem of a point takes the whole backward: each value that it reads
    is saved by the forward, or its op runs again somewhere in the backward.

    | a value of the forward that is not live anyway | bytes if saved |
    |---|---|
    | read by an op after the point | k times its size |
    | any other | k - 1 times its size |
    | the state of a recomputed op | k - 1 times its size |

    In every schedule, the backward runs the ops of `backward`, and recomputes those of `forced`,
    whose time is counted elsewhere. The proof is in docs/internals/algorithms.md.
    """
    num_others = graph.num_in_flight - 1
    outputs = {storage for storage in graph.storages if storage.is_output}
    problem, values = knapsack_of(
        graph.forward_ops, backward, costs, available=outputs, with_states=True, recomputed=forced
    )
    read_after = {storage for op in point.after for storage in op.reads} - point.live
    weights = [num_others + (storage in read_after) for storage in values]
    weights += [num_others] * (len(problem.value_bytes) - len(values))
    pairs = zip(weights, problem.value_bytes, strict=True)
    return replace(problem, value_bytes=tuple(weight * size for weight, size in pairs)), values
