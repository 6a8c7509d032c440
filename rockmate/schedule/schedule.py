"""A schedule: the order in which ops run, forward then backward, recomputations included.

The order alone determines which values are saved and when each is released: a read takes the latest
run's result, and a value is released after its last read before the next run of its op (see
`schedule.liveness`). `in_place` marks the runs that write their result into the memory of an input
whose last read they are.

Solvers make schedules, the simulator measures them, the emitter turns them into code. This file
knows none of the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np

from rockmate._util import Bools, Ints
from rockmate.costs.cost import Cost, Costs
from rockmate.graph.in_place import operands_in_place
from rockmate.graph.ir import Graph, Op, Storage
from rockmate.schedule.liveness import COPIED, KIND_MASK, DefUse, op_def_use
from rockmate.schedule.move import Fetch, Move


@dataclass(frozen=True, slots=True)
class Schedule:
    """Op indices in running order.

    Attributes:
        forward: runs before the loss is returned.
        backward: runs of the backward: backward and late ops once each, forward ops once for each
            recomputation.
        in_place: positions in `steps` of the runs whose result takes over the memory of the first
            operand that may be overwritten and ends there.
        moves: values that leave memory between runs and come back.
        fetches: frozen weights that come from their home and are dropped. A weight that has any is
            in memory within them alone.
        def_use: definitions and uses of the runs; None if they have not been computed.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    in_place: frozenset[int] = frozenset()
    moves: tuple[Move, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    def_use: DefUse | None = field(default=None, compare=False, repr=False)

    @property
    def steps(self) -> tuple[int, ...]:
        """Forward and backward in one sequence."""
        return self.forward + self.backward

    @property
    def order(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Move, ...]]:
        """Forward, backward and moves: all that liveness depends on."""
        return self.forward, self.backward, self.moves

    @property
    def copies(self) -> tuple[Move | Fetch, ...]:
        """Moves, then fetches: all that has events, by the index that events have."""
        return self.moves + self.fetches

    def num_recomputations(self) -> int:
        """Number of runs beyond the first of each op."""
        return len(self.steps) - len(set(self.steps))

    def recomputed_positions(self) -> list[int]:
        """Positions of the runs that recompute: those beyond the first of each op."""
        seen: set[int] = set()
        found = []
        for position, index in enumerate(self.steps):
            if index in seen:
                found.append(position)
            seen.add(index)
        return found

    def run_costs(self, costs: Costs) -> list[Cost]:
        """The cost of each run: that of its op's first run, or of a recomputation."""
        recomputed = set(self.recomputed_positions())
        return [
            (costs.recompute if position in recomputed else costs.first)[index]
            for position, index in enumerate(self.steps)
        ]

    def rows(self, names: Sequence[str]) -> list[str]:
        """One line for each run: half, index and name of the op, and its marks.

        The mark "again" stands for a recomputation, "in-place" for a run in place.
        """
        recomputed = set(self.recomputed_positions())
        rows = []
        for position, index in enumerate(self.steps):
            half = "forward" if position < len(self.forward) else "backward"
            again = " again" if position in recomputed else ""
            in_place = " in-place" if position in self.in_place else ""
            rows.append(f"{half} {index} {names[index]}{again}{in_place}")
        return rows


def baseline_schedule(graph: Graph, backward: Sequence[Op] | None = None) -> Schedule:
    """The schedule without recomputation: each op runs once, what the backward reads is saved.

    Late and backward ops run in the order of `backward`, or if it is None in that of the graph.
    """
    order = graph.backward_ops if backward is None else backward
    return finish(graph, [op.index for op in graph.forward_ops], [op.index for op in order])


def finish(graph: Graph, forward: Sequence[int], backward: Sequence[int]) -> Schedule:
    """The schedule of these runs without its dead runs, with every run in place that can be."""
    ops = op_def_use(graph)
    def_use = DefUse.of(ops, forward, backward)
    is_needed = _is_needed(def_use, len(forward))
    if not is_needed.all():
        backward = list(compress(backward, is_needed[len(forward) :]))
        forward = list(compress(forward, is_needed))
        def_use = DefUse.of(ops, forward, backward)
    in_place = _in_place(graph, def_use)
    return Schedule(tuple(forward), tuple(backward), in_place, def_use=def_use)


def with_moves(graph: Graph, schedule: Schedule, moves: Sequence[Move]) -> Schedule:
    """The same runs with these moves in place of its own, and every run in place that can be."""
    def_use = DefUse.of(op_def_use(graph), schedule.forward, schedule.backward, moves)
    in_place = _in_place(graph, def_use)
    return replace(schedule, moves=tuple(moves), in_place=in_place, def_use=def_use)


def moved_like(other: Schedule, graph: Graph) -> Schedule | None:
    """The runs and moves of another graph's schedule that are needed here, finished.

    None if runs are left out, since moves stand between them.
    """
    schedule = finish(graph, other.forward, other.backward)
    if not other.copies:
        return schedule
    if (schedule.forward, schedule.backward) != (other.forward, other.backward):
        return None
    moved = with_moves(graph, schedule, other.moves) if other.moves else schedule
    return replace(moved, fetches=other.fetches)


def last_reads(
    graph: Graph, forward: Sequence[int], backward: Sequence[int], moves: Sequence[Move] = ()
) -> list[list[Storage]]:
    """For each position the storages whose last read that run is, so that it may take their memory.

    What is still to be copied behind the run is not among them.
    """
    ends: list[list[Storage]] = [[] for _ in range(len(forward) + len(backward))]
    found = _ended_by_runs(DefUse.of(op_def_use(graph), forward, backward, moves))
    for position, storage in zip(*(each.tolist() for each in found), strict=True):
        ends[position].append(graph.storages[storage])
    return ends


def find_in_place(
    graph: Graph, forward: Sequence[int], backward: Sequence[int], moves: Sequence[Move] = ()
) -> frozenset[int]:
    """Positions whose op has an in-place form and one operand whose memory ends there.

    Nobody else holds that memory.
    """
    return _in_place(graph, DefUse.of(op_def_use(graph), forward, backward, moves))


def _ended_by_runs(def_use: DefUse) -> tuple[Ints, Ints]:
    """`DefUse.released` without the values that are still to be copied behind the run."""
    is_read = def_use.keys & KIND_MASK != COPIED
    chosen = def_use.is_last & ~def_use.ops.is_held[def_use.storage] & is_read
    return def_use.position[chosen], def_use.storage[chosen]


def _in_place(graph: Graph, def_use: DefUse) -> frozenset[int]:
    positions, storages = _ended_by_runs(def_use)
    can_be_taken = operands_in_place(graph)[def_use.steps[positions]] == storages[:, np.newaxis]
    return frozenset(positions[can_be_taken.any(axis=1)].tolist())


def _is_needed(def_use: DefUse, num_forward: int) -> Bools:
    """For each run whether it is needed, dead runs being found by counting readers.

    A run is needed if a needed run reads what it makes, if the step returns it or copies it into a
    buffer, if it hands a gradient to the gradient sink, or if it is the first draw of a random op.
    """
    ops, steps = def_use.ops, def_use.steps
    definitions = def_use.definitions()
    reads = np.flatnonzero(~def_use.is_definition)
    reader, maker = def_use.position[reads], def_use.position[definitions[reads]]
    num_readers = np.bincount(maker, minlength=len(steps))
    np.add.at(num_readers, _makers_of_returned(def_use, definitions), 1)
    has_effect = ops.has_final_gradient[steps] | (ops.is_random[steps] & def_use.is_first)
    must_run = has_effect.copy()
    if ops.is_copied.any():
        # The copies at the end of the forward are reads that no pruned run takes away.
        is_copied = (reader == num_forward - 1) & ops.is_copied[def_use.storage[reads]]
        must_run[maker[is_copied]] = True
    is_pruned = np.zeros(len(steps), dtype=np.bool_)
    unread = np.flatnonzero((num_readers == 0) & ~has_effect)
    while len(unread):
        is_pruned[unread] = True
        is_gone = is_pruned[reader]
        num_readers -= np.bincount(maker[is_gone], minlength=len(steps))
        reader, maker = reader[~is_gone], maker[~is_gone]
        unread = np.flatnonzero((num_readers == 0) & ~must_run & ~is_pruned)
    return ~is_pruned


def _makers_of_returned(def_use: DefUse, definitions: Ints) -> Ints:
    """Positions of the runs whose results the step returns."""
    returned = def_use.ops.returned
    last = np.searchsorted(def_use.storage, returned, side="right") - 1
    is_made = def_use.storage[last] == returned
    return def_use.position[definitions[last[is_made]]]
