"""Which ops of a step become one kernel.

A planner wants values that it can keep, and cheap ways to recompute the others. So groups end where
a value is made from two large ones:

* The *source* of a pointwise value is the one large value that it can be computed from alone. Small
  operands, masks and integers do not count. A value with two sources, and one that is not
  pointwise, is a *kept value*: its own source.
* Forward groups grow from producers to consumers. They end at kept values, at results of
  normalizations, and at tables that are computed from static values alone. So a kept value is the
  result of one op, and what hangs on it (a normalization, an activation, a rotary embedding) is one
  kernel that runs again from it alone. If a residual sum and the normalization behind it were one
  kernel, recomputing the normalization would need the addends of the sum, and so a matrix product.
* Backward groups run once. They grow to any convex set of ops, also over siblings that read one
  large gradient. They *absorb* the forward values with another source that they read: they compute
  these from the source. A value that another backward op needs in memory is not absorbed, since its
  source would be live beside it.

A group is convex: no path leaves it and comes back. The order of random ops counts as a dependency,
so that draws keep eager's order.

A value that the user has marked stays the result of its own op.

All gradients that a group reads depend on the same tangents. Where the loss leaves an output out,
the gradients behind it are undefined (`runtime.undefined_tangents`), and a group must be defined as
a whole or not at all. An op that adds gradients of several outputs stays by itself.

The idea that chains of cheap ops are recomputed inside of the kernels that read them is that of
PyTorch's min-cut partitioner (`torch/_functorch/partitioners.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rockmate.capture.nodes import tensors_of
from rockmate.fusion.fusible import is_fusible, is_pointwise, is_reduction
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.graph.node_marks import marks_of

# An operand of so much fewer elements is a side input, such as a statistic or a rotary table.
_SMALLER = 4


@dataclass(eq=False, slots=True)
class Group:
    """Ops that run as one kernel.

    Attributes:
        ops: the ops that it stands for, in order.
        absorbed: forward ops that it runs again inside, in order.
    """

    ops: list[Op]
    absorbed: list[Op] = field(default_factory=list)

    @property
    def phase(self) -> Phase:
        """The phase of its ops."""
        return self.ops[0].phase

    @property
    def num_calls(self) -> int:
        """The number of ops that the kernel runs."""
        return len(self.ops) + len(self.absorbed)


def find_groups(graph: Graph) -> list[Group]:
    """The groups of a step, each of at least two ops; forward groups first, each in graph order."""
    growth = _Growth(graph)
    for op in graph.ops:
        if op.phase is not Phase.LATE and is_fusible(op) and not _is_marked(op):
            growth.place(op)
    groups = growth.groups()
    for group in groups:
        group.ops.sort(key=lambda op: op.index)
        if group.phase is Phase.BACKWARD:
            group.absorbed = _absorbed(graph, growth.sources, group)
    return [group for group in groups if group.num_calls > 1]


def _is_marked(op: Op) -> bool:
    """Whether the user has marked a value of the op, which a group would not make."""
    return any(marks_of(node) for node in (op.node, *(storage.root for storage in op.writes)))


def _numel(storage: Storage) -> int:
    return max(tensor.numel() for tensor in tensors_of(storage.root))


def _is_large(storage: Storage, *beside: Op) -> bool:
    """Whether an operand counts as a source of a result of these ops."""
    is_number = any(tensor.is_floating_point() for tensor in tensors_of(storage.root))
    largest = max(_numel(written) for op in beside for written in op.writes)
    return is_number and _numel(storage) * _SMALLER > largest


def sources_of(graph: Graph) -> dict[Storage, Storage | None]:
    """The source of each value; None for values that parameters, inputs and constants suffice for.

    Static storages have no source: they are there in any case.
    """
    sources: dict[Storage, Storage | None] = {}
    for storage in graph.storages:
        if storage.is_static:
            sources[storage] = None
        elif storage.is_tangent:
            sources[storage] = storage
    for op in graph.ops:
        found = {sources[read] for read in op.reads if _is_large(read, op)} - {None}
        is_chained = is_pointwise(op) and len(found) < 2
        for storage in op.writes:
            sources[storage] = next(iter(found), None) if is_chained else storage
    return sources


def _tangents_of(graph: Graph) -> dict[Storage, frozenset[Storage]]:
    """The tangents that each value depends on."""
    found = {
        storage: frozenset([storage] if storage.is_tangent else []) for storage in graph.storages
    }
    for op in graph.ops:
        own = frozenset().union(*(found[read] for read in op.reads))
        found.update(dict.fromkeys(op.writes, own))
    return found


class _Growth:
    """Places ops into groups one by one, in graph order."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.sources = sources_of(graph)
        self._tangents = _tangents_of(graph)
        self._group_of: dict[Op, Group] = {}
        draws = [op for op in graph.ops if op.is_random]
        self._last_draw = dict(zip(draws[1:], draws, strict=False))

    def groups(self) -> list[Group]:
        """The groups, by their first op."""
        found = dict.fromkeys(self._group_of.values())
        return sorted(found, key=lambda group: min(op.index for op in group.ops))

    def place(self, op: Op) -> None:
        """Adds an op to a group that it can join, and merges others that it can join, too."""
        if len({self._tangents[read] for read in op.reads} - {frozenset()}) > 1:
            return
        tangents = self._tangents[op.writes[0]]
        joined: Group | None = None
        for group in dict.fromkeys(self._neighbours(op)):
            if self._tangents[group.ops[0].writes[0]] != tangents:
                continue
            if joined is None:
                if not self._path_between(self._outside_inputs([op], group), group):
                    group.ops.append(op)
                    self._group_of[op] = joined = group
            elif self._can_merge(joined, group):
                joined.ops += group.ops
                self._group_of.update(dict.fromkeys(group.ops, joined))
        if joined is None:
            self._group_of[op] = Group([op])

    def _neighbours(self, op: Op) -> Iterator[Group]:
        """Groups of the op's phase that it may join by its sources, before convexity."""
        for read in op.reads:
            group = self._group_of.get(read.producer) if read.producer else None
            if group is not None and group.phase is op.phase and not self._ends_group(read, op):
                yield group
        for read in op.reads:
            if read.is_static:
                continue
            for sibling in self._graph.readers[read]:
                group = self._group_of.get(sibling)
                if (
                    group is not None
                    and group.phase is op.phase
                    and self._are_siblings(op, sibling, read)
                ):
                    yield group

    def _ends_group(self, read: Storage, reader: Op) -> bool:
        """Whether a forward group ends with a value, so that its reader begins another one."""
        producer = read.producer
        assert producer is not None
        if producer.phase is not Phase.FORWARD:
            return False
        if self.sources[read] is None:  # a table or a mask, for many readers
            return self.sources[reader.writes[0]] is not None
        if not _is_large(read, reader):
            return False
        is_kept = is_pointwise(producer) and self.sources[read] is read
        is_norm = is_reduction(producer) and _is_large(read, producer)
        return is_kept or is_norm

    def _are_siblings(self, op: Op, sibling: Op, read: Storage) -> bool:
        """Whether two readers of one value belong into one group."""
        if op.phase is Phase.BACKWARD:
            is_gradient = read.is_tangent or read.phase is Phase.BACKWARD
            return is_gradient and _is_large(read, op)
        mine, theirs = self.sources[op.writes[0]], self.sources[sibling.writes[0]]
        return mine is not None and mine is theirs

    # --- convexity ---

    def _can_merge(self, left: Group, right: Group) -> bool:
        return not self._path_between(
            self._outside_inputs(left.ops, right, left), right
        ) and not self._path_between(self._outside_inputs(right.ops, left, right), left)

    def _producers(self, op: Op) -> Iterator[Op]:
        yield from (read.producer for read in op.reads if read.producer is not None)
        if op in self._last_draw:
            yield self._last_draw[op]

    def _outside_inputs(self, ops: Iterable[Op], *inside: Group) -> list[Op]:
        return [
            producer
            for op in ops
            for producer in self._producers(op)
            if self._group_of.get(producer) not in inside
        ]

    def _path_between(self, starts: list[Op], goal: Group) -> bool:
        """Whether one of these ops depends on a group."""
        first = min(op.index for op in goal.ops)
        pending, seen = list(starts), set[Op]()
        while pending:
            op = pending.pop()
            group = self._group_of.get(op)
            if group is goal:
                return True
            if op in seen:
                continue
            members = group.ops if group else [op]
            seen.update(members)
            # What stands before the group, whole, cannot depend on it. The backward of the step is
            # no input of its forward.
            if max(member.index for member in members) < first:
                continue
            pending += [each for member in members for each in self._producers(member)]
        return False


def _absorbed(graph: Graph, sources: dict[Storage, Storage | None], group: Group) -> list[Op]:
    """The forward ops whose results a backward group computes itself, in order."""
    found: set[Op] = set()
    pending = [read for op in group.ops for read in op.reads]
    while pending:
        read = pending.pop()
        op = read.producer
        if op is None or op in found or op.phase is Phase.BACKWARD or not is_pointwise(op):
            continue
        if _is_marked(op):
            continue
        is_needed = any(
            other.phase is not Phase.FORWARD and not is_fusible(other)
            for other in graph.readers[read]
        )
        if sources[read] is read or is_needed or read.is_result or not _is_large(read, *group.ops):
            continue
        found.add(op)
        pending += op.reads
    return sorted(found, key=lambda op: op.index)
