"""Which storages are made and read as a schedule runs, in arrays sorted by storage, then by time.

What a schedule releases, what it takes, which of its runs serve nobody and where its values are live are all read off this. A storage
that somebody else gave (static ones, tangents) is made by no run and left out. A result is made by the first run of its op alone:
it stays, so that a later run leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from rockmate._arrays import Bools, Ints
from rockmate.graph.ir import Graph, Op, state_bytes

# In the order in which one run does them; COPIED stands at the end of the forward.
READ, DEFINED, COPIED = 1, 2, 3
KIND_BITS, KINDS = 2, 3  # that tell them apart, and their mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpDefUse:
    """What each op reads and makes, one op after the other, and what there is to know of storages and ops by index.

    Attributes:
        begin: where those of each op begin in the next two; one more at the end.
        storage: indices of storages that some op makes.
        is_made: whether the op makes it; else it reads it.
        num_bytes: of each storage.
        is_held: whether somebody holds the storage, so that no last read releases it.
        is_result: whether it is a result.
        is_copied: whether what is in it is copied into a buffer or an input when the forward has ended.
        tangent_bytes: of all tangents together.
        returned: indices of the storages that the step returns, ascending.
        written_bytes: of each op.
        has_final_gradient: whether an op hands gradients over.
        is_random: whether it draws from the generator.
        state_bytes: what an op needs of its first run to run again; see `state_bytes`.
        producer: index of the op that makes each storage; -1 where there is none.
        is_evictable: whether a storage takes memory, and its op can run again.
        inputs: for each op what a further run reads that can be missing: pairs of a storage and the op that makes it, by index; None if
            it cannot run again.
    """

    begin: Ints
    storage: Ints
    is_made: Bools
    num_bytes: Ints
    is_held: Bools
    is_result: Bools
    is_copied: Bools
    tangent_bytes: int
    returned: Ints
    written_bytes: Ints
    has_final_gradient: Bools
    is_random: Bools
    state_bytes: Ints
    producer: Ints
    is_evictable: Bools
    inputs: tuple[tuple[tuple[int, int], ...] | None, ...]

    @staticmethod
    def of(graph: Graph) -> OpDefUse:
        """Those of a graph."""
        def_use = [
            [
                *((s.index, False) for s in op.reads if s.producer),
                *((s.index, True) for s in op.writes),
            ]
            for op in graph.ops
        ]
        flat = np.array([access for own in def_use for access in own], dtype=np.int64).reshape(
            -1, 2
        )
        storages, updates = graph.storages, set(graph.updates)
        return OpDefUse(
            begin=np.cumsum([0, *map(len, def_use)]),
            storage=flat[:, 0],
            is_made=flat[:, 1].astype(np.bool_),
            num_bytes=np.array([storage.num_bytes for storage in storages], dtype=np.int64),
            is_held=np.array(
                [s.is_static or s.is_tangent or s.is_result for s in storages], dtype=np.bool_
            ),
            is_result=np.array([storage.is_result for storage in storages], dtype=np.bool_),
            is_copied=np.array([storage in updates for storage in storages], dtype=np.bool_),
            tangent_bytes=sum(storage.num_bytes for storage in storages if storage.is_tangent),
            returned=np.array(
                sorted({graph.storage_of[node].index for node, _ in graph.outputs}), dtype=np.int64
            ),
            written_bytes=np.array([op.written_bytes for op in graph.ops], dtype=np.int64),
            has_final_gradient=np.array(
                [bool(op.final_gradients) for op in graph.ops], dtype=np.bool_
            ),
            is_random=np.array([op.is_random for op in graph.ops], dtype=np.bool_),
            state_bytes=np.array([state_bytes(op) for op in graph.ops], dtype=np.int64),
            producer=np.array(
                [-1 if s.producer is None else s.producer.index for s in storages], dtype=np.int64
            ),
            is_evictable=np.array(
                [bool(s.num_bytes and s.producer and s.producer.is_recomputable) for s in storages],
                dtype=np.bool_,
            ),
            inputs=tuple(_inputs(op) if op.is_recomputable else None for op in graph.ops),
        )


_DEF_USE: WeakKeyDictionary[Graph, OpDefUse] = WeakKeyDictionary()


def op_def_use(graph: Graph) -> OpDefUse:
    """The definitions and uses of a graph's ops, computed once for each graph."""
    if graph not in _DEF_USE:
        _DEF_USE[graph] = OpDefUse.of(graph)
    return _DEF_USE[graph]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DefUse:
    """Accesses of a schedule by storage; for each storage by time, a run's reads before what it makes, copies at the forward's end last.

    Attributes:
        steps: indices of the ops in running order.
        is_first: whether a run is the first of its op.
        keys: each access as one number, ascending: storage, position and kind (`READ`, `DEFINED`, `COPIED`), one above the other.
        num_bits: of a key below the storage.
        storage: index of the storage of each access.
        position: of its run in `steps`.
        is_made: whether the run makes the storage; else it reads it.
        is_last: whether nobody reads it from there on before it is made anew.
    """

    steps: Ints
    is_first: Bools
    keys: Ints
    num_bits: int
    storage: Ints
    position: Ints
    is_made: Bools
    is_last: Bools

    @staticmethod
    def of(graph: Graph, forward: Sequence[int], backward: Sequence[int]) -> DefUse:
        """Those of a schedule; what is copied into a buffer or an input when the forward has ended is read behind its last run."""
        ops = op_def_use(graph)
        steps = np.array([*forward, *backward], dtype=np.int64)
        first = np.empty(
            len(ops.begin) - 1, dtype=np.int64
        )  # position of each op's first run, which is assigned last
        first[steps[::-1]] = np.arange(len(steps))[::-1]
        is_first = first[steps] == np.arange(len(steps))
        counts = ops.begin[steps + 1] - ops.begin[steps]
        position = np.repeat(np.arange(len(steps)), counts)
        place = np.arange(len(position)) + np.repeat(
            ops.begin[steps] - (np.cumsum(counts) - counts), counts
        )
        storage, is_made = ops.storage[place], ops.is_made[place]
        # What the first run made stays: results, and up to the forward's end the updates of buffers.
        is_lasting = ops.is_result[storage] | (ops.is_copied[storage] & (position < len(forward)))
        is_new = ~(is_made & is_lasting) | is_first[position]
        num_bits = len(steps).bit_length() + KIND_BITS
        keys = ((storage << num_bits) + (position << KIND_BITS) + READ + is_made)[is_new]
        if len(forward):
            keys = np.concatenate(
                [
                    keys,
                    (np.flatnonzero(ops.is_copied) << num_bits)
                    + (len(forward) - 1 << KIND_BITS)
                    + COPIED,
                ]
            )
        keys.sort()
        storage, position = split_keys(keys, num_bits)
        is_made = keys & KINDS == DEFINED
        is_last = np.ones(len(keys), dtype=np.bool_)
        is_last[:-1] = is_made[1:] | (storage[1:] != storage[:-1])
        return DefUse(
            steps=steps,
            is_first=is_first,
            keys=keys,
            num_bits=num_bits,
            storage=storage,
            position=position,
            is_made=is_made,
            is_last=is_last,
        )

    def makers(self) -> Ints:
        """For each access, which access made what it reads, or makes: the one that the storage was made by last."""
        return np.maximum.accumulate(np.where(self.is_made, np.arange(len(self.storage)), 0))

    def released(self, graph: Graph) -> tuple[Ints, Ints]:
        """Positions, and the storages whose memory is released when the run there has ended.

        Left out is what someone else holds. A storage that nobody reads ends where it is made.
        """
        chosen = self.is_last & ~op_def_use(graph).is_held[self.storage]
        return self.position[chosen], self.storage[chosen]


def split_keys(keys: Ints, num_bits: int) -> tuple[Ints, Ints]:
    """Storages and positions of keys as in `DefUse.keys`."""
    return keys >> num_bits, (keys & (1 << num_bits) - 1) >> KIND_BITS


def _inputs(op: Op) -> tuple[tuple[int, int], ...]:
    return tuple(
        (storage.index, storage.producer.index)
        for storage in op.reads
        if storage.producer and not storage.is_result
    )
