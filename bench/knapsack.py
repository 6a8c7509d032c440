"""The plain whole-graph knapsack: a yardstick for planners, written apart from the one that it is held against.

Each forward value is saved, or recomputed once; the bytes saved at the end of the forward are limited; the recomputation
time is the least possible. That is one 0/1 program over the whole graph. What it decides is placed as late as possible
in the backward. The peak is nobody's concern here: replay the schedule to have it.

====== ==================================================================================================
symbol meaning
====== ==================================================================================================
S_v    storage v is saved
R_o    op o is recomputed
====== ==================================================================================================

    minimize    sum of time_o R_o
    where       S_v + R_o >= 1       for each v that the backward reads, o its maker
                S_v + R_o >= R_p     for each recomputed p that reads v, o its maker
                sum of bytes_v S_v + sum of state_o R_o <= limit

with state_o the random state that o needs to draw the same numbers again. What the user holds is saved for nothing but counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import pulp

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op, Phase, Storage, state_bytes
from rockmate.schedule.schedule import Schedule, finish

_Item = TypeVar("_Item", Op, Storage)

RELATIVE_GAP = (
    3e-3  # of the recomputation time: equal layers make the last thousandths a search through ties
)


class UnsolvedKnapsackError(RuntimeError):
    """No proven answer: the limit is below what has to be saved, or the solver ran out of time."""


def plain_knapsack(
    graph: Graph, costs: Costs, saved_limit_bytes: int, *, time_limit_s: float = 60.0
) -> Schedule:
    """The schedule of least recomputation time, to `RELATIVE_GAP`, that saves at most so much.

    Args:
        graph: ops and storages of one step.
        costs: time of each op when it runs again.
        saved_limit_bytes: bound on what is live when the forward has ended, outputs and random states included.
        time_limit_s: cap on the solver.

    Raises:
        UnsolvedKnapsackError: no choice saves so little, or none was proven best in time.
    """
    recomputed, saved = _solve(graph, costs, saved_limit_bytes, time_limit_s)
    return finish(
        graph,
        [op.index for op in graph.forward_ops],
        _as_late_as_possible(graph, recomputed, saved),
    )


def _solve(
    graph: Graph, costs: Costs, limit_bytes: int, time_limit_s: float
) -> tuple[set[Op], set[Storage]]:
    program = pulp.LpProblem("knapsack", pulp.LpMinimize)
    ops = graph.forward_ops
    values = [storage for op in ops for storage in op.writes]
    # Integers within bounds: PuLP gives a binary variable the bounds 0 and 1, whatever else is asked for.
    saved = {
        v: program.add_variable(f"S{v.index}", int(v.is_output), 1, pulp.LpInteger) for v in values
    }
    recompute = {
        op: program.add_variable(
            f"R{op.index}", 0, int(op.recompute_target is not None), pulp.LpInteger
        )
        for op in ops
    }
    program += pulp.lpSum(costs.recompute[op.index].time_ms * recompute[op] for op in ops)
    for value in _read_by_backward(graph):
        program += saved[value] + recompute[_maker(value)] >= 1
    for op in ops:
        for value in op.reads:
            if value in saved:
                program += saved[value] + recompute[_maker(value)] >= recompute[op]
    bytes_of_values = pulp.lpSum(v.num_bytes * saved[v] for v in values)
    bytes_of_states = pulp.lpSum(state_bytes(op) * recompute[op] for op in ops)
    program += bytes_of_values + bytes_of_states <= limit_bytes
    status = program.solve(_solver(time_limit_s))
    if status == pulp.LpStatusInfeasible:
        message = f"no choice of what to recompute once saves at most {limit_bytes:,} bytes. Raise the limit."
        raise UnsolvedKnapsackError(message)
    if status != pulp.LpStatusOptimal or program.sol_status != pulp.LpSolutionOptimal:
        message = f"a knapsack of {len(ops)} ops within {limit_bytes:,} bytes took more than {time_limit_s:g} s. Raise time_limit_s."
        raise UnsolvedKnapsackError(message)
    return _chosen(recompute), _chosen(saved)


def _solver(time_limit_s: float) -> pulp.LpSolver:
    """HiGHS where it is installed, else the CBC that comes with PuLP."""
    highs = pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit_s, gapRel=RELATIVE_GAP)
    if highs.available():
        return highs
    # By its path, since the solver class that knows the path warns of its removal.
    return pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path,
        msg=False,
        threads=1,
        timeLimit=time_limit_s,
        gapRel=RELATIVE_GAP,
    )


def _chosen(variables: Mapping[_Item, pulp.LpVariable]) -> set[_Item]:
    return {item for item, variable in variables.items() if (variable.value() or 0.0) > 0.5}


def _read_by_backward(graph: Graph) -> Iterable[Storage]:
    read = {storage: None for op in graph.backward_ops for storage in op.reads}
    return [
        storage for storage in read if storage.producer and storage.producer.phase is Phase.FORWARD
    ]


def _maker(value: Storage) -> Op:
    assert value.producer is not None
    return value.producer


def _as_late_as_possible(
    graph: Graph, recomputed: Collection[Op], saved: Collection[Storage]
) -> list[int]:
    """The backward, written from its end: an op that floats is placed as soon as all that read it are.

    Backward ops keep the graph's order. Recomputed ops float, and so do late ones, which read no gradient.
    """
    floating = {
        *recomputed,
        *(op for op in graph.backward_ops if op.phase is Phase.LATE and not _has_result(op)),
    }
    fixed = [op for op in graph.backward_ops if op not in floating]

    def sources(op: Op) -> set[Op]:
        return {v.producer for v in op.reads if v not in saved and v.producer in floating}

    unplaced = dict.fromkeys(floating, 0)  # readers that are yet to be placed
    for reader in (*fixed, *floating):
        for source in sources(reader):
            unplaced[source] += 1
    written: list[int] = []
    for op in reversed(fixed):
        ready = [-op.index]
        while ready:
            index = -heapq.heappop(ready)
            written.append(index)
            for source in sources(graph.ops[index]):
                unplaced[source] -= 1
                if unplaced[source] == 0:
                    heapq.heappush(ready, -source.index)
    return written[::-1]


def _has_result(op: Op) -> bool:
    return bool(op.final_gradients) or any(storage.is_result for storage in op.writes)
