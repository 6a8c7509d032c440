"""The knapsack of a program point with several forwards in flight.

While one step runs, the saved values of the k - 1 others are in memory. So a value that is saved by
the forward counts k - 1 times at every point of the step, and once more at a point before its last
read. The problem of a point takes the whole backward: each value that it reads is saved by the
forward, or its op runs again somewhere in the backward.

| a value of the forward that is not live anyway | bytes if saved |
|---|---|
| read by an op after the point | k times its size |
| any other | k - 1 times its size |
| the state of a recomputed op | k - 1 times its size |

The proof is in docs/internals/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from checkmate import Knapsack
from rockmate.bound.knapsack import knapsack_of
from rockmate.bound.program_point import ProgramPoint
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op, Storage


def in_flight_knapsack(
    graph: Graph,
    costs: Costs,
    point: ProgramPoint,
    backward: Sequence[Op],
    forced: Collection[Op],
) -> tuple[Knapsack, list[Storage]]:
    """The problem of one point, and the values of its variables; see `knapsack_of`.

    Args:
        graph: ops and storages, with several forwards in flight.
        costs: costs of the ops.
        point: the program point.
        backward: the ops that run in the backward of every schedule.
        forced: forward ops that marks have run again there, at a time counted elsewhere.
    """
    num_others = graph.num_in_flight - 1
    outputs = {storage for storage in graph.storages if storage.is_output}
    problem, values = knapsack_of(
        graph.forward_ops,
        backward,
        costs,
        available=outputs,
        with_states=True,
        recomputed=forced,
    )
    read_after = {storage for op in point.after for storage in op.reads} - point.live
    weights = [num_others + (storage in read_after) for storage in values]
    weights += [num_others] * (len(problem.value_bytes) - len(values))
    weighted = tuple(
        weight * size for weight, size in zip(weights, problem.value_bytes, strict=True)
    )
    return replace(problem, value_bytes=weighted), values
