"""Partition of a graph into a chain of blocks.

A *cut* is a position in forward order. Exactly one storage crosses it, apart from carried storages.
A *carried* storage is small, or it lives across many blocks: a mask, a rotary table, an encoder's
output, a skip connection. It is live from its first write to its last read, backward included. It
is never recomputed.

Two thresholds decide which storages are carried: a size and a lifetime. Every pair of candidates is
tried. The result is the chain with the smallest sum of the carried bytes and the bytes of the
largest block. No plan over these blocks needs much less than that sum.

A backward op belongs to the block of the forward op that it differentiates. Autograd's sequence
number tells which one. A backward op never belongs to a later block than the ops whose gradients it
reads. So the blocks of the backward run one after the other, last block first.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rockmate.graph.ir import Graph, Op, Phase, Storage

# Candidates for the size, as shares of all activation bytes. A smaller storage is carried.
_SMALL_SHARES = (1e-3, 3e-4, 1e-4, 3e-5)
# Candidates for the lifetime, in forward ops. A storage with a longer lifetime is carried.
_LIFETIMES = (24, 48, 96, 200, 1 << 60)
# A chain has at most this many blocks. The time of the dynamic program is cubic in their number.
_MAX_BLOCKS = 100
# A block has at least this many ops with a large result.
_MIN_LARGE_OPS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A run of forward ops between two cuts, with the backward ops that belong to them.

    Attributes:
        forward: forward ops in order.
        backward: late and backward ops in order.
        input: the storage that crosses the cut before the block; None for the first block.
        output: the storage that crosses the cut after the block; None for the last block.
    """

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    input: Storage | None
    output: Storage | None

    @property
    def name(self) -> str:
        """The longest common path of the submodules of its forward ops."""
        return _common_path([op.module for op in self.forward if op.module]) or "the model's root"


@dataclass(frozen=True, slots=True, eq=False)
class BlockChain:
    """The blocks of a graph and the storages that no block recomputes.

    Attributes:
        blocks: in forward order.
        carried: storages that are live from their first write to their last read.
    """

    blocks: tuple[Block, ...]
    carried: frozenset[Storage]

    def whole(self) -> Block:
        """All blocks as one."""
        return Block(
            tuple(op for block in self.blocks for op in block.forward),
            tuple(op for block in reversed(self.blocks) for op in block.backward),
            self.blocks[0].input,
            self.blocks[-1].output,
        )

    def with_backward_as_in(self, order: Sequence[Op]) -> BlockChain:
        """The same blocks, with the late and backward ops of each in the given order."""
        place = {op: position for position, op in enumerate(order)}
        return replace(
            self,
            blocks=tuple(
                replace(block, backward=tuple(sorted(block.backward, key=place.__getitem__)))
                for block in self.blocks
            ),
        )

    def __str__(self) -> str:
        rows = [
            f"{index:4d} {len(block.forward):3d} forward {len(block.backward):3d} backward ops, "
            f"output {block.output.num_bytes if block.output else 0:>12,} B  {block.name}"
            for index, block in enumerate(self.blocks)
        ]
        carried_bytes = sum(storage.num_bytes for storage in self.carried)
        return "\n".join([*rows, f"carried: {len(self.carried)} storages, {carried_bytes:,} B"])


def partition(graph: Graph) -> BlockChain:
    """Cuts the graph into a chain of blocks; a graph without cuts becomes one block."""
    forward = graph.forward_ops
    lives = _forward_lives(forward)
    total = sum(storage.num_bytes for storage in lives)
    tried: dict[tuple[int, ...], BlockChain] = {}
    for share, lifetime in itertools.product(_SMALL_SHARES, _LIFETIMES):
        small = total * share
        carried = frozenset(
            s
            for s, (born, last) in lives.items()
            if last > born and (s.num_bytes <= small or last - born > lifetime)
        )
        boundary_at = _cuts(forward, lives, carried)
        cuts = tuple(_merge_small(forward, sorted(boundary_at), small))
        if cuts not in tried:
            boundaries = [boundary_at[cut] for cut in cuts]
            tried[cuts] = _assemble(graph, forward, cuts, carried, boundaries)
    return min(tried.values(), key=_floor)


def _forward_lives(forward: Sequence[Op]) -> dict[Storage, tuple[int, int]]:
    """For each storage of the forward, the positions of its first write and of its last read."""
    lives: dict[Storage, tuple[int, int]] = {}
    for position, op in enumerate(forward):
        for storage in op.reads:
            if storage in lives:
                lives[storage] = (lives[storage][0], position)
        for storage in op.writes:
            lives[storage] = (position, position)
    return lives


def _cuts(
    forward: Sequence[Op], lives: Mapping[Storage, tuple[int, int]], carried: frozenset[Storage]
) -> dict[int, Storage]:
    """Position of each cut -> the storage that crosses it; the first cut for each storage."""
    begins: list[list[Storage]] = [[] for _ in forward]
    ends: list[list[Storage]] = [[] for _ in forward]
    for storage, (born, last) in lives.items():
        if storage not in carried and last > born:
            begins[born].append(storage)
            ends[last].append(storage)
    crossing: dict[Storage, None] = {}
    first_cut: dict[Storage, int] = {}
    for position in range(len(forward) - 1):
        crossing.update(dict.fromkeys(begins[position]))
        for storage in ends[position]:
            del crossing[storage]
        if len(crossing) == 1:
            first_cut.setdefault(next(iter(crossing)), position)
    return {cut: storage for storage, cut in first_cut.items()}


def _merge_small(forward: Sequence[Op], cuts: Sequence[int], small: float) -> list[int]:
    """A subset of the cuts, with enough large ops in every block and few enough blocks.

    An op is large if a storage that it writes has more than `small` bytes.
    """
    is_large = [any(storage.num_bytes > small for storage in op.writes) for op in forward]
    minimum = _MIN_LARGE_OPS
    while True:
        kept: list[int] = []
        start = 0
        for cut in cuts:
            if sum(is_large[start : cut + 1]) >= minimum:
                kept.append(cut)
                start = cut + 1
        if kept and sum(is_large[kept[-1] + 1 :]) < minimum:
            kept.pop()
        if len(kept) < _MAX_BLOCKS:
            return kept
        minimum += 1


def _floor(chain: BlockChain) -> int:
    """Estimates the lowest peak: the carried bytes plus the bytes of the largest block."""
    sizes = [
        sum(s.num_bytes for op in block.forward for s in op.writes if s not in chain.carried)
        for block in chain.blocks
    ]
    return sum(storage.num_bytes for storage in chain.carried) + max(sizes)


def _assemble(
    graph: Graph,
    forward: Sequence[Op],
    cuts: Sequence[int],
    carried: frozenset[Storage],
    boundaries: Sequence[Storage],
) -> BlockChain:
    block_of = {op: bisect_left(cuts, position) for position, op in enumerate(forward)}
    carried |= {storage for op in forward if op.recompute_target is None for storage in op.writes}
    _assign_backward(graph, block_of)
    extra = _read_from_afar(graph, block_of, boundaries, carried)
    inputs: list[Storage | None] = [None, *boundaries]
    outputs: list[Storage | None] = [*boundaries, None]
    members: list[tuple[list[Op], list[Op]]] = [([], []) for _ in inputs]
    for op in graph.ops:
        members[block_of[op]][op.phase is not Phase.FORWARD].append(op)
    blocks = [
        Block(tuple(ahead), tuple(back), inputs[index], outputs[index])
        for index, (ahead, back) in enumerate(members)
    ]
    return BlockChain(tuple(blocks), carried | extra)


def _assign_backward(graph: Graph, block_of: dict[Op, int]) -> None:
    """Adds the block of every late and backward op to `block_of`."""
    by_sequence: dict[int, int] = {}
    for op, block in block_of.items():
        number = op.node.meta.get("seq_nr")
        if number is not None:
            by_sequence[number] = block
    last = max(block_of.values(), default=0)
    for op in graph.backward_ops:
        if op.phase is Phase.BACKWARD:
            own = by_sequence.get(op.node.meta.get("seq_nr", -1), last)
            made = [s.producer for s in op.reads if s.producer and s.phase is Phase.BACKWARD]
            block_of[op] = min([own, *(block_of[each] for each in made)])
    for op in reversed(graph.backward_ops):
        if op.phase is Phase.LATE:
            # It runs right before its first reader, and the last block runs first.
            readers = [
                block_of[user]
                for storage in op.writes
                for user in graph.readers.get(storage, ())
                if user in block_of
            ]
            block_of[op] = max(readers, default=last)


def _read_from_afar(
    graph: Graph,
    block_of: Mapping[Op, int],
    boundaries: Sequence[Storage],
    carried: frozenset[Storage],
) -> frozenset[Storage]:
    """Forward storages that the backward of another block reads, apart from that block's input."""
    inputs: list[Storage | None] = [None, *boundaries]
    return frozenset(
        storage
        for op in graph.backward_ops
        for storage in op.reads
        if (maker := storage.producer) is not None
        and maker.phase is Phase.FORWARD
        and block_of[maker] != block_of[op]
        and storage is not inputs[block_of[op]]
        and storage not in carried
    )


def _common_path(paths: Sequence[str]) -> str:
    levels = zip(*(path.split(".") for path in paths), strict=False)
    shared = [first for first, *_ in itertools.takewhile(lambda level: len({*level}) == 1, levels)]
    return ".".join(shared) or (f"{paths[0]} to {paths[-1]}" if paths else "")
