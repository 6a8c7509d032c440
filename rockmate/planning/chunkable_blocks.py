"""The blocks of a step that may run in chunks of their rows, and the chunkings worth planning.

Two kinds of blocks qualify: the loss block, and feed-forward blocks whose values are large. A
refusal says in words why a block runs whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import ceil, inf

from rockmate.capture.options import Numerics
from rockmate.graph.chunking.blocks import Blocks
from rockmate.graph.chunking.chunks import Chunks, separable_blocks
from rockmate.graph.chunking.region import Refusal, Region
from rockmate.plan.record import ChunkingNote, ChunkingNotes
from rockmate.planning.candidate import Candidate
from rockmate.planning.step import CapturedStep

# Numbers of chunks of the loss block to plan.
_NUM_CHUNKS = (2, 4, 8, 16)
# Smallest number of rows of the largest chunk.
_MIN_ROWS = 8
# Number of chunks of a feed-forward block.
_LAYER_CHUNKS = 4
# A block runs in chunks only if its largest value exceeds this share of the baseline peak.
_MIN_PEAK_SHARE = 0.02
# Chunks are tried only if the largest value of a block exceeds this share of the budget: of a loss
# block, three such values are live together. Of 17 budgets that language models fit whole,
# estimated for two machines, none had a faster plan in chunks below a share of 0.37.
_MIN_BUDGET_SHARE = 1 / 3
_UNUSED_HINT = "it can be, and would be no faster by more than noise"
_NOT_ALLOWED = "chunks add in another order (numerics='bitwise')"


class ChunkableBlocks:
    """The blocks of one captured step that may run in chunks.

    The blocks are found on demand, since that takes a copy of the graph.

    Args:
        step: as captured.
        baseline_peak_bytes: the peak of the step without recomputation.
        numerics: as for `Planner`.
    """

    def __init__(self, step: CapturedStep, baseline_peak_bytes: int, *, numerics: Numerics) -> None:
        self._step = step
        self._min_bytes = _MIN_PEAK_SHARE * baseline_peak_bytes
        self._numerics = numerics

    @property
    def is_allowed(self) -> bool:
        """Whether any block may run in chunks."""
        return self._numerics != "bitwise" and not self._step.options.loss_chunks

    @cached_property
    def _separable(self) -> Blocks:
        return separable_blocks(self._step.capture, least_bytes=ceil(self._min_bytes))

    @property
    def loss(self) -> Region | Refusal:
        """The largest loss block, or why none can run in chunks."""
        return self._separable.loss

    @property
    def loss_modules(self) -> str:
        """Paths of the submodules of all loss blocks, or of the one that cannot run in chunks."""
        block = self.loss
        names = dict.fromkeys(block.name for block in self._separable.losses.values())
        return block.block if isinstance(block, Refusal) else ", ".join(names)

    @property
    def feed_forward(self) -> tuple[Region | Refusal, ...]:
        """The large feed-forward blocks, or why they cannot run in chunks."""
        return tuple(self._separable.feed_forward.values())

    @cached_property
    def loss_refusal(self) -> str:
        """Why no chunking of the loss block is planned; empty if there is one."""
        if not self.is_allowed:
            return _NOT_ALLOWED
        block = self.loss
        if isinstance(block, Refusal):
            return str(block)
        if block.num_bytes < self._min_bytes:
            return (
                f"the largest value of the loss block ({block.num_bytes:,} bytes) is below "
                f"{_MIN_PEAK_SHARE:.0%} of the step's peak"
            )
        if not _has_rows_for(block, _NUM_CHUNKS[0]):
            return f"the loss block has {block.num_rows} rows, too few for chunks of {_MIN_ROWS}"
        return ""

    @cached_property
    def chunkings(self) -> tuple[tuple[Chunks, ...], ...]:
        """The chunkings to plan: forms of small peaks first, each with falling chunk sizes."""
        if not self.is_allowed:
            return ()
        block = self.loss
        numbers = []
        if isinstance(block, Region) and not self.loss_refusal:
            numbers = [each for each in _NUM_CHUNKS if _has_rows_for(block, each)]
        forms = [
            tuple(Chunks(number, form) for number in numbers) for form in ("recompute", "at_once")
        ]
        layers = [each for each in self.feed_forward if isinstance(each, Region)]
        if any(_has_rows_for(each, _LAYER_CHUNKS) for each in layers):
            smallest_peak = Chunks(max([1, *numbers]), "recompute", layers=_LAYER_CHUNKS)
            forms.insert(0, (smallest_peak,))
        return tuple(form for form in forms if form)

    def may_help(self, budget_bytes: int) -> bool:
        """Whether chunks may be faster within a budget: not where it holds all values with ease."""
        least_bytes = _MIN_BUDGET_SHARE * budget_bytes
        return bool(self.chunkings) and any(
            isinstance(block, Region) and block.num_bytes >= least_bytes
            for block in (self.loss, *self.feed_forward)
        )

    def chunk_bytes(self, chunking: Chunks) -> int:
        """The bytes that the loss block's largest value takes in its largest chunk.

        They are live at some point of every schedule. 0 where the loss block runs whole.
        """
        block = self.loss
        if chunking.number == 1 or isinstance(block, Refusal):
            return 0
        return block.num_bytes // block.num_rows * -(-block.num_rows // chunking.number)


def _has_rows_for(block: Region, number: int) -> bool:
    """Whether the largest of so many chunks has rows enough, with the copies of each."""
    rows_of_largest = ceil(block.num_rows / number)
    return rows_of_largest * block.space.num_copies >= _MIN_ROWS and number <= block.num_rows


def find_notes(
    blocks: ChunkableBlocks, chunks: Chunks | None, whole: Callable[[], Candidate | None]
) -> ChunkingNotes:
    """How the blocks of one form of a step run, and why. It takes a copy of the graph.

    Args:
        blocks: of the step as captured.
        chunks: of the form; None for the step as captured.
        whole: finds the fastest schedule without chunks.
    """
    text = chunks.describe() if chunks else f"not in chunks: {blocks.loss_refusal or _UNUSED_HINT}"
    bitwise_ms = None
    if chunks:
        found = whole()
        bitwise_ms = inf if found is None else found.time_ms
    return ChunkingNotes(
        loss_block=ChunkingNote(module=blocks.loss_modules, text=text),
        feed_forward=tuple(_layer_note(blocks, each, chunks) for each in blocks.feed_forward),
        bitwise_ms=bitwise_ms,
    )


def _layer_note(
    blocks: ChunkableBlocks, block: Region | Refusal, chunks: Chunks | None
) -> ChunkingNote:
    if isinstance(block, Refusal):
        return ChunkingNote(module=block.block, text=f"not in chunks: {block}")
    if chunks and chunks.layers > 1:
        return ChunkingNote(module=block.name, text=f"in {chunks.layers} chunks of its rows")
    reason = _UNUSED_HINT if blocks.is_allowed else _NOT_ALLOWED
    if blocks.is_allowed and not _has_rows_for(block, _LAYER_CHUNKS):
        reason = f"it has {block.num_rows} rows, too few for {_LAYER_CHUNKS} chunks of {_MIN_ROWS}"
    return ChunkingNote(module=block.name, text=f"not in chunks: {reason}")
