"""What a plan says of the blocks that might run in chunks; computed when it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from rockmate.graph.chunking.chunks import Chunks
from rockmate.graph.chunking.region import Refusal, Region
from rockmate.plan.chunking_notes import ChunkingNote
from rockmate.planning.candidate import Candidate
from rockmate.planning.chunkable_blocks import UNUSED_HINT, ChunkableBlocks


@dataclass(frozen=True, slots=True)
class FormNotes:
    """The notes on one form of a step; a `ChunkingNotes`.

    To find the blocks takes a copy of the graph, so it waits until a note is read.

    Attributes:
        blocks: of the step as captured.
        chunks: of the form; None for the step as captured.
        search: finds schedules without chunks.
        budget_bytes: of the plan.
    """

    blocks: ChunkableBlocks
    chunks: Chunks | None
    search: Callable[[int], Candidate | None]
    budget_bytes: int

    @property
    def loss_block(self) -> ChunkingNote:
        """Whether the loss block runs in chunks, and why."""
        block = self.blocks.loss
        module = block.block if isinstance(block, Refusal) else block.name
        if self.chunks:
            return ChunkingNote(module=module, text=self.chunks.describe())
        reason = self.blocks.loss_refusal or UNUSED_HINT
        return ChunkingNote(module=module, text=f"not in chunks: {reason}")

    @property
    def feed_forward(self) -> tuple[ChunkingNote, ...]:
        """Whether each large feed-forward block runs in chunks, and why."""
        return tuple(map(self._layer_note, self.blocks.feed_forward))

    @property
    def bitwise_ms(self) -> float | None:
        """Time of the fastest schedule found without chunks, if the form is in chunks."""
        if not self.chunks:
            return None
        found = self.search(self.budget_bytes)
        return inf if found is None else found.time_ms

    def _layer_note(self, block: Region | Refusal) -> ChunkingNote:
        if isinstance(block, Refusal):
            return ChunkingNote(module=block.block, text=f"not in chunks: {block}")
        if self.chunks and (layers := self.chunks.layers) > 1:
            return ChunkingNote(module=block.name, text=f"in {layers} chunks of its rows")
        reason = self.blocks.layer_refusal(block) or UNUSED_HINT
        return ChunkingNote(module=block.name, text=f"not in chunks: {reason}")
