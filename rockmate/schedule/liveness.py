"""Definitions and uses of values in a schedule: the one definition of liveness.

A value is live from the run that makes it, or the copy that brings it back, to its last read before
its op runs once more, or to the end of the copy that moves it away. This file states that once, on
arrays of indices: `OpDefUse` holds the reads and writes of each op, `DefUse` those of each run of a
schedule, sorted by storage, then by time. Everything else derives from it:

| where | what it derives |
|---|---|
| `schedule.simulate.simulate` | live bytes, peak |
| `schedule.schedule` | dead recomputations, last reads, runs in place |
| `plan.residency` | live intervals of a plan, from its snapshot alone |
| `planning.live_ranges` | the incremental form: one move changes a few intervals |
| `schedule.simulate.simulate_part` | its own scan of one stretch; a test states that they agree |

Two conventions. Only storages that an op makes are listed, so static storages and tangents are not.
A result of the step (an output, a returned gradient) is defined by the first run of its op alone:
it stays live to the end, so a recomputation leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rockmate._util import Bools, Ints, once_for_each
from rockmate.graph.ir import Graph
from rockmate.schedule.move import Move

# Kinds of access, ascending in the order in which one run does them. FETCHED makes a value by a
# copy back, before the run. COPIED reads it behind the run: a copy into its buffer or input at the
# end of the forward, or a copy out that has to have ended.
FETCHED, READ, DEFINED, COPIED = 0, 1, 2, 3
# Number of low bits of a key that hold the kind, and their mask.
KIND_BITS, KIND_MASK = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpDefUse:
    """Reads and writes of each op, and facts about ops and storages, as arrays by index.

    Attributes:
        begin: position of each op's first entry in the next two arrays; one more at the end.
        storage: storage of each entry.
        is_definition: whether the op makes the storage; otherwise it reads it.
        num_bytes: size of each storage.
        is_held: whether a storage is live whatever the ops read, so that no read releases it.
        is_result: whether a storage is a result of the step.
        is_copied: whether a storage is copied into a buffer or an input when the forward ends.
        tangent_bytes: size of all tangents together.
        returned: indices of the storages that the step returns, ascending.
        written_bytes: bytes of all storages that each op makes.
        reusing_bytes: bytes of the first of them, which alone may take the memory of an operand.
        has_final_gradient: whether an op hands gradients to the gradient sink.
        is_random: whether an op draws from the generator.
        state_bytes: bytes of the state that each op's recomputation replays.
        num_in_flight: number of forwards that run before the backward of the first.
    """

    begin: Ints
    storage: Ints
    is_definition: Bools
    num_bytes: Ints
    is_held: Bools
    is_result: Bools
    is_copied: Bools
    tangent_bytes: int
    returned: Ints
    written_bytes: Ints
    reusing_bytes: Ints
    has_final_gradient: Bools
    is_random: Bools
    state_bytes: Ints
    num_in_flight: int = 1

    @staticmethod
    def of(
        *,
        reads: Sequence[Sequence[int]],
        writes: Sequence[Sequence[int]],
        is_random: Iterable[bool],
        has_final_gradient: Iterable[bool],
        state_bytes: Iterable[int],
        num_bytes: Iterable[int],
        is_static: Iterable[bool],
        is_tangent: Iterable[bool],
        is_result: Iterable[bool],
        updates: Iterable[int],
        returned: Iterable[int],
        num_in_flight: int,
    ) -> OpDefUse:
        """The tables of a step, from columns by op and by storage.

        `Op`, `Storage` and the class say what they are. `reads` and `writes` have the storages of
        each op, `updates` those that are copied into a buffer or an input when the forward ends,
        and `returned` those that the step returns.
        """
        sizes = np.array([*num_bytes], dtype=np.int64)
        made = {storage for written in writes for storage in written}
        entries = [
            [*((s, False) for s in read if s in made), *((s, True) for s in written)]
            for read, written in zip(reads, writes, strict=True)
        ]
        flat = np.array([entry for own in entries for entry in own], dtype=np.int64).reshape(-1, 2)
        results, tangents = _flags(is_result), _flags(is_tangent)
        return OpDefUse(
            begin=np.cumsum([0, *map(len, entries)]),
            storage=flat[:, 0],
            is_definition=flat[:, 1].astype(np.bool_),
            num_bytes=sizes,
            is_held=_flags(is_static) | tangents | results,
            is_result=results,
            is_copied=np.isin(np.arange(len(sizes)), [*updates]),
            tangent_bytes=int(sizes[tangents].sum()),
            returned=np.array(sorted(set(returned)), dtype=np.int64),
            written_bytes=np.array([sizes[[*own]].sum() for own in writes], dtype=np.int64),
            reusing_bytes=np.array([sizes[own[0]] for own in writes], dtype=np.int64),
            has_final_gradient=_flags(has_final_gradient),
            is_random=_flags(is_random),
            state_bytes=np.array([*state_bytes], dtype=np.int64),
            num_in_flight=num_in_flight,
        )


def _flags(values: Iterable[bool]) -> Bools:
    return np.array([*values], dtype=np.bool_)


@once_for_each
def op_def_use(graph: Graph) -> OpDefUse:
    """The reads and writes of a graph's ops."""
    ops, storages = graph.ops, graph.storages
    return OpDefUse.of(
        reads=[[storage.index for storage in op.reads] for op in ops],
        writes=[[storage.index for storage in op.writes] for op in ops],
        is_random=(op.is_random for op in ops),
        has_final_gradient=(bool(op.final_gradients) for op in ops),
        state_bytes=(op.recompute_state_bytes for op in ops),
        num_bytes=(storage.num_bytes for storage in storages),
        is_static=(storage.is_static for storage in storages),
        is_tangent=(storage.is_tangent for storage in storages),
        is_result=(storage.is_result for storage in storages),
        updates=(storage.index for storage in graph.updates),
        returned=(graph.storage_of[node].index for node, _ in graph.outputs),
        num_in_flight=graph.num_in_flight,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DefUse:
    """Definitions and uses in a schedule, sorted by storage, then by time.

    Within one run the reads come before the definitions. The copies at the end of the forward come
    after its last run.

    Attributes:
        ops: reads and writes of each op.
        steps: indices of the ops in running order.
        is_first: for each run, whether it is the first of its op.
        keys: each access as one ascending number: storage, position and kind (`FETCHED`, `READ`,
            `DEFINED`, `COPIED`), from the high bits to the low ones.
        num_bits: number of bits of a key below the storage.
        storage: storage of each access.
        position: position in `steps` of each access.
        is_definition: whether the access makes the storage, by its op or by a copy back; otherwise
            it reads it.
        is_last: whether no read follows before the next definition.
    """

    ops: OpDefUse
    steps: Ints
    is_first: Bools
    keys: Ints
    num_bits: int
    storage: Ints
    position: Ints
    is_definition: Bools
    is_last: Bools

    @staticmethod
    def of(
        ops: OpDefUse, forward: Sequence[int], backward: Sequence[int], moves: Sequence[Move] = ()
    ) -> DefUse:
        """The definitions and uses of a schedule, whose halves are indices of ops in order."""
        steps = np.array([*forward, *backward], dtype=np.int64)
        is_first = _is_first(steps, len(ops.begin) - 1)
        counts = ops.begin[steps + 1] - ops.begin[steps]
        position = np.repeat(np.arange(len(steps)), counts)
        entry = np.arange(len(position)) + np.repeat(
            ops.begin[steps] - (np.cumsum(counts) - counts), counts
        )
        storage, is_definition = ops.storage[entry], ops.is_definition[entry]
        is_access = ~(is_definition & ops.is_result[storage]) | is_first[position]
        num_bits = len(steps).bit_length() + KIND_BITS
        keys = (storage << num_bits) + (position << KIND_BITS) + READ + is_definition
        keys = keys[is_access]
        if len(forward):
            copies = np.flatnonzero(ops.is_copied) << num_bits
            copies += (len(forward) - 1 << KIND_BITS) + COPIED
            keys = np.concatenate([keys, copies])
        if moves:
            keys = np.concatenate([keys, _move_keys(moves, num_bits)])
        keys.sort()
        storage, position = split_keys(keys, num_bits)
        kinds = keys & KIND_MASK
        is_definition = (kinds == DEFINED) | (kinds == FETCHED)
        is_last = np.ones(len(keys), dtype=np.bool_)
        is_last[:-1] = is_definition[1:] | (storage[1:] != storage[:-1])
        return DefUse(
            ops=ops,
            steps=steps,
            is_first=is_first,
            keys=keys,
            num_bits=num_bits,
            storage=storage,
            position=position,
            is_definition=is_definition,
            is_last=is_last,
        )

    def definitions(self) -> Ints:
        """For each access the index of the access that defines the value it makes or reads."""
        own = np.where(self.is_definition, np.arange(len(self.storage)), 0)
        return np.maximum.accumulate(own)

    def released(self) -> tuple[Ints, Ints]:
        """Positions, and the storages that are released when the run there has ended.

        Held storages are not among them. A storage without a read ends where it is made.
        """
        chosen = self.is_last & ~self.ops.is_held[self.storage]
        return self.position[chosen], self.storage[chosen]


def _move_keys(moves: Sequence[Move], num_bits: int) -> Ints:
    """The accesses of moves: the end of each copy out, and each copy back."""
    ends = [(move.storage, move.sent - 1, COPIED) for move in moves]
    ends += [(move.storage, move.fetch, FETCHED) for move in moves]
    storage, position, kind = np.array(ends, dtype=np.int64).T
    return (storage << num_bits) + (position << KIND_BITS) + kind


def split_keys(keys: Ints, num_bits: int) -> tuple[Ints, Ints]:
    """Storages and positions of keys as in `DefUse.keys`."""
    return keys >> num_bits, (keys & (1 << num_bits) - 1) >> KIND_BITS


def _is_first(steps: Ints, num_ops: int) -> Bools:
    """For each run whether it is the first of its op."""
    first = np.empty(num_ops, dtype=np.int64)
    # Assigned from the last run to the first, so that the first one remains.
    first[steps[::-1]] = np.arange(len(steps))[::-1]
    return first[steps] == np.arange(len(steps))
