"""A schedule: the order in which ops run, forward then backward, with recomputed ops standing more than once.

Nothing else is said: what is kept from the forward to the backward, and when memory is released, follows from the order. A read
takes the latest run's result; a result is released after its last read before the next run of the same op. `in_place` marks the
runs that may write into the memory of an input which dies there.

`Schedule` is what the solvers make, the simulator judges and the emitter turns into code; it knows none of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from rockmate._arrays import Bools
from rockmate.graph.in_place import operands_in_place
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.schedule.liveness import DefUse, op_def_use


@dataclass(frozen=True, slots=True)
class Schedule:
    """Op indices in running order.

    Attributes:
        forward: runs before the loss is returned.
        backward: runs of the backward: backward and late ops once each, forward ops as often as they are recomputed.
        in_place: positions in forward + backward whose result takes over the memory of its first read that dies there.
        def_use: what the runs make and read, None where nobody has looked.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    in_place: frozenset[int] = frozenset()
    def_use: DefUse | None = field(default=None, compare=False, repr=False)

    @property
    def steps(self) -> tuple[int, ...]:
        """Forward and backward in one sequence."""
        return self.forward + self.backward

    def num_recomputations(self) -> int:
        """Runs beyond the first of each op."""
        return len(self.steps) - len(set(self.steps))

    def recomputed_positions(self) -> list[int]:
        """Positions of the runs that repeat an earlier one."""
        seen: set[int] = set()
        found = []
        for position, index in enumerate(self.steps):
            if index in seen:
                found.append(position)
            seen.add(index)
        return found

    def rows(self, names: Sequence[str]) -> list[str]:
        """One line a run: half, index and name of the op, whether it has run before, whether it works in place.

        Args:
            names: of the ops, by index.
        """
        repeated = set(self.recomputed_positions())
        rows = []
        for position, index in enumerate(self.steps):
            half = "forward" if position < len(self.forward) else "backward"
            recompute, place = (
                " again" if position in repeated else "",
                " in-place" if position in self.in_place else "",
            )
            rows.append(f"{half} {index} {names[index]}{recompute}{place}")
        return rows

    def to_text(self, graph: Graph) -> str:
        """`rows` under each other; `from_text` reads them back."""
        return "\n".join(self.rows([op.name for op in graph.ops]))

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """The schedule that `to_text` printed."""
        rows = [line.split() for line in text.splitlines() if line.strip()]
        return cls(
            tuple(int(row[1]) for row in rows if row[0] == "forward"),
            tuple(int(row[1]) for row in rows if row[0] == "backward"),
            frozenset(position for position, row in enumerate(rows) if row[-1] == "in-place"),
        )

    def verify(self, graph: Graph) -> None:
        """Asserts that the schedule computes the step: each needed op runs, on results that exist, with random ops in order."""
        made: set[Storage] = {storage for storage in graph.storages if storage.is_static}
        runs: Counter[int] = Counter()
        for position, index in enumerate(self.steps):
            op = graph.ops[index]
            if position == len(self.forward):
                made.update(storage for storage in graph.storages if storage.is_tangent)
            if position < len(self.forward):
                assert op.phase is Phase.FORWARD, f"{op} runs in the forward"
            else:
                assert op.phase is not Phase.FORWARD or runs[index], (
                    f"{op} runs first in the backward"
                )
            missing = [storage for storage in op.reads if storage not in made]
            assert not missing, f"{op} at {position} reads {missing} before it is made"
            assert not runs[index] or op.recompute_target is not None, f"{op} cannot run again"
            runs[index] += 1
            made.update(op.writes)
        ends = {storage for storage in graph.storages if storage.is_result} | set(graph.updates)
        never = [
            op
            for op in graph.ops
            if not runs[op.index]
            and (op.final_gradients or op.is_random or not ends.isdisjoint(op.writes))
        ]
        assert not never, f"{never} never run"
        misplaced = self.in_place - find_in_place(graph, self.forward, self.backward)
        assert not misplaced, (
            f"no operand ends at {sorted(misplaced)}, whose memory an op in place could take"
        )
        random_first = [index for index in dict.fromkeys(self.steps) if graph.ops[index].is_random]
        assert random_first == sorted(random_first), "random ops draw in another order than eager's"


def baseline_schedule(graph: Graph, backward: Sequence[Op] | None = None) -> Schedule:
    """The schedule without recomputation: each op once, and every value saved that the backward reads.

    Args:
        graph: the ops; those of the forward run in its order.
        backward: late and backward ops in running order; None stands for the order of the graph.
    """
    order = graph.backward_ops if backward is None else backward
    return finish(graph, [op.index for op in graph.forward_ops], [op.index for op in order])


def finish(graph: Graph, forward: Sequence[int], backward: Sequence[int]) -> Schedule:
    """Drops runs whose results nobody reads, then finds the runs that can work in place."""
    def_use = DefUse.of(graph, forward, backward)
    is_needed = _is_needed(graph, def_use, len(forward))
    if not is_needed.all():
        forward, backward = (
            list(compress(forward, is_needed)),
            list(compress(backward, is_needed[len(forward) :])),
        )
        def_use = DefUse.of(graph, forward, backward)
    return Schedule(
        tuple(forward), tuple(backward), _in_place(graph, def_use, len(forward)), def_use
    )


def _is_needed(graph: Graph, def_use: DefUse, num_forward: int) -> Bools:
    """For each run whether it makes anything that is read before it is made anew, returned, handed over or drawn."""
    ops, steps = op_def_use(graph), def_use.steps
    makers = def_use.makers()
    reads = np.flatnonzero(~def_use.is_made)
    reader, maker = def_use.position[reads], def_use.position[makers[reads]]
    num_readers = np.bincount(maker, minlength=len(steps))
    last = np.searchsorted(def_use.storage, ops.returned, side="right") - 1
    np.add.at(num_readers, def_use.position[makers[last[def_use.storage[last] == ops.returned]]], 1)
    is_wanted = (
        (num_readers > 0)
        | ops.has_final_gradient[steps]
        | (ops.is_random[steps] & def_use.is_first)
    )
    is_pruned = np.zeros(len(steps), dtype=np.bool_)
    must_run = is_wanted & (num_readers == 0)
    if graph.updates:  # what the forward made of them is copied when it has ended
        is_copied = (reader == num_forward - 1) & ops.is_copied[def_use.storage[reads]]
        must_run[maker[is_copied]] = True
    unread = np.flatnonzero(~is_wanted)
    while len(unread):
        is_pruned[unread] = True
        gone = is_pruned[reader]
        num_readers -= np.bincount(maker[gone], minlength=len(steps))
        reader, maker = reader[~gone], maker[~gone]
        unread = np.flatnonzero((num_readers == 0) & ~must_run & ~is_pruned)
    return ~is_pruned


def last_reads(
    graph: Graph, forward: Sequence[int], backward: Sequence[int]
) -> list[list[Storage]]:
    """For each position the storages whose memory is released when that run has ended; see `DefUse.released`."""
    ends: list[list[Storage]] = [[] for _ in range(len(forward) + len(backward))]
    for position, storage in zip(
        *map(np.ndarray.tolist, DefUse.of(graph, forward, backward).released(graph)), strict=True
    ):
        ends[position].append(graph.storages[storage])
    return ends


def find_in_place(graph: Graph, forward: Sequence[int], backward: Sequence[int]) -> frozenset[int]:
    """Positions at which the op has an in-place form and one operand's memory dies there, unseen by anyone else."""
    return _in_place(graph, DefUse.of(graph, forward, backward), len(forward))


def _in_place(graph: Graph, def_use: DefUse, num_forward: int) -> frozenset[int]:
    positions, storages = def_use.released(graph)
    if graph.updates:  # those that end with the forward are still to be copied then
        is_copied = (positions == num_forward - 1) & op_def_use(graph).is_copied[storages]
        positions, storages = positions[~is_copied], storages[~is_copied]
    can_be_taken = operands_in_place(graph)[def_use.steps[positions]] == storages[:, np.newaxis]
    return frozenset(positions[can_be_taken.any(axis=1)].tolist())
