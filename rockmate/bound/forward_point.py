"""Program points of the forward: the first runs of forward ops.

While a forward op runs for the first time, all that it depends on has run, and all of the backward
is still to come. So a value that the backward reads, made by an op before the point, is live at the
point or its op runs again later. A value that is made after the point costs nothing here. Where a
loss block runs in the forward with its own backward (chunks of the form "at_once"), the largest
values are live in the forward, and only these points see them.

The proof is in docs/internals/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rockmate.bound.program_point import ProgramPoint, ProgramPoints
from rockmate.graph.ir import Graph, Op, Phase, Storage

# Largest number of points of one graph. Each takes a knapsack of most of the forward.
_MAX_POINTS = 3


def forward_points(
    points: ProgramPoints, backward: Sequence[Op], above_bytes: int
) -> list[ProgramPoint]:
    """Points of the forward that need more than so many bytes, and more than all that follow.

    A later point has more values before it, so an earlier one says more only if it needs more
    bytes. None with several forwards in flight, where values of the others are in memory, too.

    Args:
        points: those of the backward of the same graph.
        backward: late and backward ops that run in every schedule.
        above_bytes: bytes that points of the backward need anyway.

    Returns:
        The points, those of most bytes first. Their `before` are forward ops, their `after`
        backward ops.
    """
    if points.graph.num_in_flight > 1:
        return []
    found: list[_Sized] = []
    for sized in reversed(list(_sized_ops(points, backward))):
        if sized[0] > above_bytes:
            found.append(sized)
            above_bytes = sized[0]
    after = tuple(op for op in backward if op.phase is Phase.BACKWARD)
    forward = points.graph.forward_ops
    return [
        ProgramPoint(
            op=op,
            before=tuple(other for other in forward if bits >> other.index & 1),
            after=after,
            live=live,
            min_bytes=num_bytes,
        )
        for num_bytes, op, bits, live in reversed(found[-_MAX_POINTS:])
    ]


# Bytes that a forward op's first run needs, the op, the ops before it as bits of their indices, and
# the storages that are live.
_Sized = tuple[int, Op, int, frozenset[Storage]]


def _sized_ops(points: ProgramPoints, backward: Sequence[Op]) -> Iterator[_Sized]:
    """The forward ops in order, with what their first run needs."""
    graph = points.graph
    before = _ancestor_bits(graph)
    waiting = list(_waiting(graph, backward, before))
    for op in graph.forward_ops:
        bits = before[op]
        own = {storage for storage in (*op.reads, *op.writes) if not storage.is_static}
        others = {
            storage
            for storage, maker_bit, reader_bits in waiting
            if bits & maker_bit and (reader_bits is None or reader_bits >> op.index & 1)
        } - own
        num_bytes = points.own_bytes(op) + sum(storage.num_bytes for storage in others)
        yield num_bytes, op, bits, frozenset(own | others)


def _ancestor_bits(graph: Graph) -> dict[Op, int]:
    """For each forward op the ops that it depends on, as bits of their indices."""
    before: dict[Op, int] = {}
    for op in graph.forward_ops:
        bits = 0
        for storage in op.reads:
            producer = storage.producer
            if producer is not None and producer in before:
                bits |= before[producer] | 1 << producer.index
        before[op] = bits
    return before


def _waiting(
    graph: Graph, backward: Sequence[Op], before: dict[Op, int]
) -> Iterator[tuple[Storage, int, int | None]]:
    """Values that are made once and held for a later reader, in every schedule.

    Yields:
        Each with the bit of its op, and the bits of the ops between that op and a reader; None
        where it is held to the end or for the backward.
    """
    in_backward = {op for op in backward if op.phase is Phase.BACKWARD}
    for op in graph.forward_ops:
        for storage in op.writes:
            if storage.is_output or storage.is_kept_to_end:
                yield storage, 1 << op.index, None
            elif op.recompute_target is None:
                readers = graph.readers.get(storage, ())
                if not in_backward.isdisjoint(readers):
                    yield storage, 1 << op.index, None
                    continue
                bits = 0
                for reader in readers:
                    bits |= before.get(reader, 0)
                yield storage, 1 << op.index, bits
