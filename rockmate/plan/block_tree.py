"""The blocks of a plan as a tree by module path, and the values that cross blocks unused.

The planner chooses for every value of the whole graph at once, so the tree decides nothing. It
names and counts blocks and their parts in reports. It is derived from the snapshot, so a loaded
plan has it too.

A run of blocks within one submodule is a part, down to the single block. A block of more than
`LARGEST_BLOCK` forward ops is one without a single storage that divides it, for example one with
parallel streams. It is divided between submodules, else halved where the fewest bytes cross, until
no part is larger. Several storages may cross such a division.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rockmate.graph.snapshot import SnapshotBlock, SnapshotChain, StepSnapshot

# Largest number of forward ops in a part that is not divided further.
LARGEST_BLOCK = 40
# Name of the root.
_WHOLE = "the whole model"
# A block is divided between submodules if they have at least so many forward ops on average.
_MIN_MEAN_OPS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockNode:
    """A part of the tree: several blocks, one block, or a piece of one.

    Attributes:
        name: path of the submodule that its ops come from, or of the first and the last one.
        first_block: index of its first block.
        last_block: index of its last block.
        forward: indices of its forward ops, in order.
        ops: indices of all its ops, forward ones first.
        parts: the parts that it consists of; empty for a leaf.
    """

    name: str
    first_block: int
    last_block: int
    forward: tuple[int, ...]
    ops: tuple[int, ...]
    parts: tuple[BlockNode, ...] = ()

    def walk(self, depth: int = 0) -> Iterator[tuple[int, BlockNode]]:
        """The part and all parts below it, each with its depth, in forward order."""
        yield depth, self
        for part in self.parts:
            yield from part.walk(depth + 1)

    def leaves(self) -> list[BlockNode]:
        """The parts below it without parts of their own."""
        return [part for _, part in self.walk() if not part.parts]

    def block(self, number: int) -> BlockNode:
        """The part that is exactly one block.

        Args:
            number: index of the block.
        """
        return next(
            part for _, part in self.walk() if part.first_block == part.last_block == number
        )

    def path_to(self, op: int) -> list[BlockNode]:
        """The parts that contain an op, from this one down; empty if it does not contain it.

        Args:
            op: index of the op.
        """
        if op not in self.ops:
            return []
        return [self, *next((path for part in self.parts if (path := part.path_to(op))), [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassThrough:
    """A value that crosses blocks unused: a skip, a mask, an encoder's output.

    Attributes:
        storage: index of the storage.
        made_in: index of the block that makes it.
        read_in: index of the last block whose forward reads it.
    """

    storage: int
    made_in: int
    read_in: int


def block_tree(snapshot: StepSnapshot, chain: SnapshotChain) -> BlockNode:
    """The tree of a plan's blocks."""
    blocks = [_whole_block(snapshot, block, index) for index, block in enumerate(chain.blocks)]
    parts = _by_path(snapshot, blocks, length=0)
    return _joined(_WHOLE, parts[0].parts if len(parts) == 1 and parts[0].parts else parts)


def _whole_block(snapshot: StepSnapshot, block: SnapshotBlock, index: int) -> BlockNode:
    forward = tuple(op for op in block.ops if snapshot.ops[op].phase == "forward")
    piece = BlockNode(
        name=block.name, first_block=index, last_block=index, forward=forward, ops=block.ops
    )
    return _divided(snapshot, piece)


def _joined(name: str, parts: Sequence[BlockNode]) -> BlockNode:
    return BlockNode(
        name=name,
        first_block=parts[0].first_block,
        last_block=parts[-1].last_block,
        forward=tuple(op for part in parts for op in part.forward),
        ops=tuple(op for part in parts for op in part.ops),
        parts=tuple(parts),
    )


def _path(snapshot: StepSnapshot, ops: Sequence[int]) -> tuple[str, ...]:
    """The common prefix of the module paths of all ops that have one."""
    paths = [snapshot.ops[op].module.split(".") for op in ops if snapshot.ops[op].module]
    shared = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return tuple(shared)


def _by_path(
    snapshot: StepSnapshot, blocks: Sequence[BlockNode], *, length: int
) -> list[BlockNode]:
    """Parts of the blocks, grouped by the name that follows the first `length` names."""
    paths = {block: _path(snapshot, block.forward) for block in blocks}
    found = []
    for name, run in groupby(blocks, key=lambda block: paths[block][: length + 1]):
        own = list(run)
        if len(name) <= length:
            found += [_named_by_ends(snapshot, block) for block in own]
        elif len(own) == 1:
            found += own
        else:
            shared = _path(snapshot, [op for block in own for op in block.forward])
            found.append(_joined(".".join(shared), _by_path(snapshot, own, length=len(shared))))
    return found


def _named_by_ends(snapshot: StepSnapshot, block: BlockNode) -> BlockNode:
    """A block within no submodule below its part's, named by its first and last submodule."""
    modules = [snapshot.ops[op].module for op in block.forward if snapshot.ops[op].module]
    return (
        replace(block, name=f"{modules[0]} to {modules[-1]}")
        if modules and modules[0] != modules[-1]
        else block
    )


# --- parts of a block -------------------------------------------------------------------------


def _divided(snapshot: StepSnapshot, piece: BlockNode) -> BlockNode:
    """The part with leaves of at most `LARGEST_BLOCK` forward ops."""
    if len(piece.forward) <= LARGEST_BLOCK:
        return piece
    runs = _runs_by_module(snapshot, piece.forward)
    if len(runs) < 2 or len(piece.forward) < _MIN_MEAN_OPS * len(runs):
        cut = _best_cut(snapshot, piece.forward)
        runs = [piece.forward[:cut], piece.forward[cut:]]
    number = {op: index for index, run in enumerate(runs) for op in run}
    modules = [{snapshot.ops[op].module for op in run} for run in runs]
    maker = {storage: op for op in piece.ops for storage in snapshot.ops[op].writes}
    for op in piece.ops[len(piece.forward) :]:
        # Autograd gives a backward op the module of the forward op that it differentiates.
        own = [index for index, names in enumerate(modules) if snapshot.ops[op].module in names]
        if len(own) == 1:
            number[op] = own[0]
            continue
        # Else it belongs to the latest forward value that it reads, or to the gradient.
        makers = [maker[storage] for storage in snapshot.ops[op].reads if storage in maker]
        ahead = [number[other] for other in makers if snapshot.ops[other].phase == "forward"]
        gradients = [number[other] for other in makers if other in number]
        number[op] = max(ahead) if ahead else min(gradients, default=len(runs) - 1)
    pieces = [[op for op in piece.ops if number[op] == index] for index in range(len(runs))]
    return _joined(piece.name, [_divided(snapshot, _piece(snapshot, piece, ops)) for ops in pieces])


def _runs_by_module(snapshot: StepSnapshot, forward: Sequence[int]) -> list[Sequence[int]]:
    """Runs of ops by submodule, directly below the innermost submodule that contains all ops.

    An op outside of these submodules joins the run before it.
    """
    length = len(_path(snapshot, forward)) + 1
    runs: list[tuple[tuple[str, ...], list[int]]] = []
    for op in forward:
        name = tuple(snapshot.ops[op].module.split("."))[:length] if snapshot.ops[op].module else ()
        if runs and (len(name) < length or name == runs[-1][0] or not runs[-1][0]):
            runs[-1][1].append(op)
            runs[-1] = (runs[-1][0] or (name if len(name) == length else ()), runs[-1][1])
        else:
            runs.append((name if len(name) == length else (), [op]))
    return [ops for _, ops in runs]


def _piece(snapshot: StepSnapshot, whole: BlockNode, ops: Sequence[int]) -> BlockNode:
    forward = tuple(op for op in ops if snapshot.ops[op].phase == "forward")
    name = ".".join(_path(snapshot, forward)) or whole.name
    return BlockNode(
        name=name,
        first_block=whole.first_block,
        last_block=whole.last_block,
        forward=forward,
        ops=tuple(ops),
    )


def _best_cut(snapshot: StepSnapshot, forward: Sequence[int]) -> int:
    """Number of ops before the best cut, which is in the middle half.

    The best cut is crossed by the fewest bytes; of equal ones it is the most even.
    """
    last_read: dict[int, int] = {}
    for position, op in enumerate(forward):
        last_read.update(dict.fromkeys(snapshot.ops[op].reads, position))
    crossing = [0] * (len(forward) + 1)
    for position, op in enumerate(forward):
        for storage in snapshot.ops[op].writes:
            for cut in range(position + 1, last_read.get(storage, position) + 1):
                crossing[cut] += snapshot.storages[storage].num_bytes
    quarter, middle = len(forward) // 4, len(forward) / 2
    return min(
        range(quarter, len(forward) - quarter + 1),
        key=lambda cut: (crossing[cut], abs(cut - middle)),
    )


# --- pass-through values ----------------------------------------------------------------------


def pass_through_values(snapshot: StepSnapshot, chain: SnapshotChain) -> list[PassThrough]:
    """Values of the forward that cross at least one block unused, largest first.

    A value that is no boundary crosses as soon as a later block reads it.
    """
    block_of = {op: number for number, block in enumerate(chain.blocks) for op in block.ops}
    boundaries = {block.output for block in chain.blocks}
    made_in = {
        storage: block_of[index]
        for index, op in enumerate(snapshot.ops)
        if op.phase == "forward"
        for storage in op.writes
    }
    read_in: dict[int, int] = {}
    for index, op in enumerate(snapshot.ops):
        if op.phase == "forward":
            for storage in op.reads:
                if storage in made_in:
                    read_in[storage] = max(read_in.get(storage, 0), block_of[index])
    found = [
        PassThrough(storage=storage, made_in=made_in[storage], read_in=last)
        for storage, last in read_in.items()
        if last > made_in[storage] + (storage in boundaries)
    ]

    def order(value: PassThrough) -> tuple[int, int, int]:
        return -snapshot.storages[value.storage].num_bytes, value.made_in, value.storage

    return sorted(found, key=order)
