"""What a plan says of the blocks that might run in chunks, worked out when it is asked for, or read from a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingNote:
    """How a block runs that might run in chunks.

    Attributes:
        module: path of the submodule with which the block begins, empty if unknown.
        text: in how many chunks and in which form, or why in none.
    """

    module: str = ""
    text: str = ""


class ChunkingNotes(Protocol):
    """The notes of one step."""

    @property
    def loss_block(self) -> ChunkingNote:
        """Whether that runs in chunks, and why."""
        ...

    @property
    def feed_forward(self) -> tuple[ChunkingNote, ...]:
        """The same of each large block that begins with a matrix product which widens its operand."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNotes:
    """Notes that need no graph.

    Attributes:
        loss_block: whether that runs in chunks, and why.
        feed_forward: the same of each large block that begins with a matrix product which widens its operand.
    """

    loss_block: ChunkingNote = ChunkingNote()
    feed_forward: tuple[ChunkingNote, ...] = ()
