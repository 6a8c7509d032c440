"""Notes of a plan on the blocks that may run in chunks: computed when asked for, or loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingNote:
    """How one block runs that may run in chunks.

    Attributes:
        module: path of the submodule with which the block begins, empty if unknown.
        text: the number of chunks and their form, or the reason for none.
    """

    module: str = ""
    text: str = ""


class ChunkingNotes(Protocol):
    """The notes of one step."""

    @property
    def loss_block(self) -> ChunkingNote:
        """The note of the loss block."""
        ...

    @property
    def feed_forward(self) -> tuple[ChunkingNote, ...]:
        """The notes of large blocks that begin with a matrix product which widens its operand."""
        ...

    @property
    def bitwise_ms(self) -> float | None:
        """Time of the fastest schedule found without chunks; infinite if none fits the budget.

        None if the step runs without, or if that is unknown.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNotes:
    """Notes that are stored, so that they need no graph.

    Attributes:
        loss_block: see `ChunkingNotes.loss_block`.
        feed_forward: see `ChunkingNotes.feed_forward`.
        bitwise_ms: see `ChunkingNotes.bitwise_ms`.
    """

    loss_block: ChunkingNote = ChunkingNote()
    feed_forward: tuple[ChunkingNote, ...] = ()
    bitwise_ms: float | None = None
