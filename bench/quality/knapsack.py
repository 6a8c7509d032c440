"""The plain whole-graph knapsack: a yardstick for planners, with no code of theirs.

Each forward value is saved or recomputed once. The bytes saved at the end of the forward are
limited, and the recomputation time is minimal. That is one 0/1 program over the whole graph.
Recomputations are placed as late as possible in the backward. The peak is not limited; a replay of
the schedule gives it.

====== =================================================================
symbol meaning
====== =================================================================
S_v    storage v is saved
R_o    op o is recomputed
====== =================================================================

    minimize    sum of time_o R_o
    where       S_v + R_o >= 1       for each v that the backward reads, o its producer
                S_v + R_o >= R_p     for each recomputed p that reads v, o its producer
                sum of bytes_v S_v + sum of state_o R_o <= limit

with state_o the random state that o needs to draw the same numbers again. Storages that the caller
holds are saved without counting.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import pulp

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.schedule.schedule import Schedule, finish

_Item = TypeVar("_Item", Op, Storage)

RELATIVE_GAP = 3e-3
"""Of the recomputation time. Equal layers make the last thousandths a search among ties."""


class UnsolvedKnapsackError(RuntimeError):
    """No proved answer: the limit is too small, or the solver ran out of time."""


def plain_knapsack(
    graph: Graph, costs: Costs, saved_limit_bytes: int, *, time_limit_s: float = 60.0
) -> Schedule:
    """The schedule with the least recomputation time within a limit on saved bytes.

    The time is optimal to `RELATIVE_GAP`.

    Args:
        graph: Ops and storages of one step.
        costs: Recomputation time of each op.
        saved_limit_bytes: Limit on the live bytes at the end of the forward, with outputs and
            random states.
        time_limit_s: Time limit of the solver.

    Raises:
        UnsolvedKnapsackError: No choice saves so little, or none was proved optimal in time.
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
    # Integer variables with bounds, since PuLP gives a binary variable the bounds 0 and 1.
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
        program += saved[value] + recompute[_producer(value)] >= 1
    for op in ops:
        for value in op.reads:
            if value in saved:
                program += saved[value] + recompute[_producer(value)] >= recompute[op]
    bytes_of_values = pulp.lpSum(v.num_bytes * saved[v] for v in values)
    bytes_of_states = pulp.lpSum(op.recompute_state_bytes * recompute[op] for op in ops)
    program += bytes_of_values + bytes_of_states <= limit_bytes
    status = program.solve(_solver(time_limit_s))
    if status == pulp.LpStatusInfeasible:
        message = (
            f"no choice of single recomputations saves at most {limit_bytes:,} bytes. "
            "Raise the limit."
        )
        raise UnsolvedKnapsackError(message)
    if status != pulp.LpStatusOptimal or program.sol_status != pulp.LpSolutionOptimal:
        message = (
            f"a knapsack of {len(ops)} ops within {limit_bytes:,} bytes took more than "
            f"{time_limit_s:g} s. Raise time_limit_s."
        )
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


def _producer(value: Storage) -> Op:
    assert value.producer is not None
    return value.producer


def _as_late_as_possible(
    graph: Graph, recomputed: Collection[Op], saved: Collection[Storage]
) -> list[int]:
    """The backward, built from its end: an op that floats is placed when all its readers are.

    Backward ops keep the graph's order. Recomputed ops float, and so do late ones, which read no
    gradient.
    """
    floating = {
        *recomputed,
        *(op for op in graph.backward_ops if op.phase is Phase.LATE and not _has_result(op)),
    }
    fixed = [op for op in graph.backward_ops if op not in floating]

    def sources(op: Op) -> set[Op]:
        return {v.producer for v in op.reads if v not in saved and v.producer in floating}

    # Number of readers that are not placed yet.
    unplaced = dict.fromkeys(floating, 0)
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
