"""The blocks of a plan as a tree by module path.

The planner chooses for every value of the whole graph at once, so the tree decides nothing. It
names and counts blocks and their parts in reports. It is derived from the snapshot, so a loaded
plan has it too.

A run of blocks within one submodule is a part, down to the single block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rockmate.graph.snapshot import SnapshotChain, StepSnapshot

# Name of the root.
_WHOLE = "the whole model"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockNode:
    """A part of the tree: several blocks, or one.

    Attributes:
        name: path of the submodule that its ops come from, or of the first and the last one.
        first_block: index of its first block.
        last_block: index of its last block.
        forward: indices of its forward ops, in order.
        ops: indices of all its ops.
        parts: the parts that it consists of; empty for a block.
    """

    name: str
    first_block: int
    last_block: int
    forward: tuple[int, ...]
    ops: tuple[int, ...]
    parts: tuple[BlockNode, ...] = ()

    def walk(self, label: str = "", indent: str = "") -> Iterator[tuple[str, BlockNode]]:
        """The part and all parts below it, each with the tree's lines that lead to its name."""
        yield label, self
        for part in self.parts:
            turn, below = ("└─ ", "   ") if part is self.parts[-1] else ("├─ ", "│  ")
            yield from part.walk(indent + turn, indent + below)

    def blocks(self) -> list[BlockNode]:
        """The blocks below it, in order."""
        return [part for _, part in self.walk() if not part.parts]


def block_tree(snapshot: StepSnapshot, chain: SnapshotChain) -> BlockNode:
    """The tree of a plan's blocks."""
    blocks = [
        BlockNode(
            name=block.name,
            first_block=index,
            last_block=index,
            forward=tuple(op for op in block.ops if snapshot.ops[op].phase == "forward"),
            ops=tuple(block.ops),
        )
        for index, block in enumerate(chain.blocks)
    ]
    parts = _by_path(snapshot, blocks, length=0)
    return _joined(_WHOLE, parts[0].parts if len(parts) == 1 < len(blocks) else parts)


def _joined(name: str, parts: Sequence[BlockNode]) -> BlockNode:
    return BlockNode(
        name=name,
        first_block=parts[0].first_block,
        last_block=parts[-1].last_block,
        forward=tuple(op for part in parts for op in part.forward),
        ops=tuple(op for part in parts for op in part.ops),
        parts=tuple(parts),
    )


def _modules(snapshot: StepSnapshot, ops: Sequence[int]) -> list[str]:
    """The module paths of all ops that have one."""
    return [snapshot.ops[op].module for op in ops if snapshot.ops[op].module]


def _path(snapshot: StepSnapshot, ops: Sequence[int]) -> tuple[str, ...]:
    """The common prefix of the ops' module paths."""
    paths = [module.split(".") for module in _modules(snapshot, ops)]
    return tuple(os.path.commonprefix(paths))  # noqa: RUF071, of lists it compares names


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
    modules = _modules(snapshot, block.forward)
    if len({*modules[:1], *modules[-1:]}) < 2:
        return block
    return replace(block, name=f"{modules[0]} to {modules[-1]}")
