"""A step as it was captured, and with its loss block in chunks: which of them runs within a budget, and fastest.

Each variant is a captured step of its own (`CapturedStep.in_chunks`), measured and planned like any other, when it is first wanted.
Few are: one whose chunk alone exceeds the budget is not even written out, one that cannot be faster by its certificate is not solved,
and since smaller chunks take no less time and no more memory, as a rule, one that fails for what it would take ends the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, inf

from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.protocol import Bounds, MinBound
from rockmate.bound.solver_time import SolverTime
from rockmate.costs.cost import Costs
from rockmate.graph.blocks import BlockChain, partition
from rockmate.graph.chunking.region import Refusal, Region
from rockmate.graph.chunking.unroll import Chunks, SeparableBlocks
from rockmate.graph.ir import Graph
from rockmate.graph.snapshot import SnapshotChain, StepSnapshot, snapshot_chain, snapshot_of
from rockmate.plan.chunking_notes import ChunkingNote, ChunkingNotes
from rockmate.planning.baseline_search import FRONTIER_POINTS, Searcher
from rockmate.planning.block_options import SolvedBlocks
from rockmate.planning.candidate import Candidate, by_time, linspace_int, nondominated
from rockmate.planning.local_search import LocalSearch
from rockmate.planning.strategies import local_search, make_search
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import Simulation, simulate
from rockmate.step import CapturedStep

_NUM_CHUNKS = (2, 4, 8, 16)
_LEAST_ROWS = 8  # of a chunk
_LAYER_CHUNKS = 4  # of a feed-forward block, where those run in chunks
_LEAST_SHARE = (
    0.02  # of the baseline's peak, below which a block's values are no reason to run it in chunks
)
_MANY = 20  # budgets, from which on they are planned together: fewer have no near neighbours
_MAY_GAIN = 0.35  # of its distance to the bound: what a schedule that is thoroughly improved may come nearer
_NOT_ALLOWED = "chunks are not allowed (allow_chunking=False)"
_CHUNKING = "rockmate"  # the strategy that may use chunks; the others are there to compare with


class Variant:
    """A captured step with all that planning it takes."""

    def __init__(
        self, step: CapturedStep, costs: Costs, solver_time: SolverTime, solved: SolvedBlocks
    ) -> None:
        """Nothing is solved yet; all solves take of `solver_time`, and share blocks through `solved`."""
        self.step = step
        self.costs = costs
        self._solver_time = solver_time
        self._solved = solved
        self._searches: dict[str, Searcher] = {}

    @property
    def graph(self) -> Graph:
        """The step as ops on storages."""
        return self.step.graph

    @cached_property
    def blocks(self) -> BlockChain:
        """Its chain of blocks."""
        return partition(self.graph)

    @cached_property
    def baseline(self) -> Simulation:
        """Nothing recomputed."""
        return simulate(self.graph, baseline_schedule(self.graph), self.costs)

    @cached_property
    def certificate(self) -> LowerBound:
        """What bounds the time of its schedules."""
        return LowerBound(
            self.graph, self.costs, self.baseline.time_ms, solver_time=self._solver_time
        )

    @cached_property
    def snapshot(self) -> StepSnapshot:
        """The step as plain values."""
        return snapshot_of(self.graph, self.step.call)

    @cached_property
    def chain(self) -> SnapshotChain:
        """Its blocks as plain values."""
        return snapshot_chain(self.blocks)

    @cached_property
    def improving(self) -> LocalSearch:
        """What finds schedules by the default strategy."""
        return local_search(
            self.graph,
            self.blocks,
            self.costs,
            certificate=self.certificate,
            solver_time=self._solver_time,
            solved=self._solved,
        )

    def search(self, strategy: str) -> Searcher:
        """What finds schedules by that strategy."""
        if strategy == _CHUNKING:
            return self.improving
        if strategy not in self._searches:
            self._searches[strategy] = make_search(
                strategy,
                self.graph,
                self.blocks,
                self.costs,
                solver_time=self._solver_time,
                certificate=self.certificate,
                solved=self._solved,
            )
        return self._searches[strategy]


class Variants:
    """The captured step and what it becomes with its loss block in chunks."""

    def __init__(
        self,
        step: CapturedStep,
        costs_of: Callable[[Graph], Costs],
        *,
        allow_chunking: bool | None,
        time_limit_s: float,
    ) -> None:
        """Measures the step as it was captured.

        Args:
            step: as it was captured.
            costs_of: measures or estimates a graph.
            allow_chunking: as for `Planner`.
            time_limit_s: wall time of all solves together, those of every variant; see `SolverTime`.
        """
        self._costs_of = costs_of
        self._allow_chunking = allow_chunking
        self._solver_time = SolverTime(time_limit_s)
        self._solved = SolvedBlocks()
        self._known: dict[Chunks, Variant | None] = {}
        self.plain = self._planned(step)

    @cached_property
    def blocks(self) -> SeparableBlocks:
        """Where the step can run in chunks, or why it cannot; feed-forward blocks only if they are large."""
        return self.plain.step.separable_blocks(
            least_bytes=ceil(_LEAST_SHARE * self.plain.baseline.peak_bytes)
        )

    @property
    def is_allowed(self) -> bool:
        """Whether any block may run in chunks."""
        return self._allow_chunking is not False

    @property
    def loss_block(self) -> Region | Refusal:
        """Where the loss block can run in chunks, or why it cannot."""
        return self.blocks.loss

    @cached_property
    def refusal(self) -> str:
        """Why there is none in chunks; empty if there is."""
        if not self.is_allowed:
            return _NOT_ALLOWED
        found = self.loss_block
        if isinstance(found, Refusal):
            return str(found)
        if found.num_bytes < _LEAST_SHARE * self.plain.baseline.peak_bytes:
            return f"the largest value of the loss block ({found.num_bytes:,} bytes) is below {_LEAST_SHARE:.0%} of the step's peak"
        if found.num_rows < _NUM_CHUNKS[0] * _LEAST_ROWS:
            return f"the loss block has {found.num_rows} rows, too few for chunks of {_LEAST_ROWS}"
        return ""

    @cached_property
    def _walks(self) -> tuple[tuple[Chunks, ...], ...]:
        """Ways to run in chunks, form by form, each from the largest chunks to the smallest; those of the smallest peak come first."""
        if not self.is_allowed:
            return ()
        block = self.loss_block
        num_rows = block.num_rows if isinstance(block, Region) and not self.refusal else 0
        numbers = [number for number in _NUM_CHUNKS if num_rows >= number * _LEAST_ROWS]
        walks = [
            tuple(Chunks(number, form) for number in numbers) for form in ("recompute", "at_once")
        ]
        if self._has_large_layers():
            walks.insert(0, (Chunks(max([1, *numbers]), "recompute", layers=_LAYER_CHUNKS),))
        return tuple(walk for walk in walks if walk)

    def _chunk_bytes(self, way: Chunks) -> int:
        """Of the loss block's largest value in its largest chunk, which is in memory at some time."""
        if way.number == 1 or isinstance(self.loss_block, Refusal):
            return 0
        num_rows = self.loss_block.num_rows
        return self.loss_block.num_bytes // num_rows * -(-num_rows // way.number)

    def _variant(self, way: Chunks) -> Variant | None:
        """The step in such chunks, None if it cannot be."""
        if way not in self._known:
            step = self.plain.step.in_chunks(way)
            self._known[way] = None if isinstance(step, Refusal) else self._planned(step)
        return self._known[way]

    def _planned(self, step: CapturedStep) -> Variant:
        return Variant(step, self._costs_of(step.graph), self._solver_time, self._solved)

    def _has_large_layers(self) -> bool:
        """Whether there are feed-forward blocks large enough for chunks."""
        return any(
            isinstance(block, Region) and _is_long(block) for block in self.blocks.feed_forward
        )

    def best_within(self, budget_bytes: int, strategy: str) -> tuple[Variant, Candidate] | None:
        """The fastest schedule known within the budget, and whose it is; None if nothing fits."""
        if strategy != _CHUNKING or not self._may_be_in_chunks(budget_bytes):
            found = self.plain.search(strategy).best_within(budget_bytes)
            return None if found is None else (self.plain, found)
        best: tuple[Variant, Candidate] | None = None
        least_ms = inf
        for variant, first in sorted(
            self._first_within(budget_bytes), key=lambda pair: by_time(pair[1])
        ):
            gap_ms = first.time_ms - variant.certificate.bound_ms(budget_bytes)
            if first.time_ms - _MAY_GAIN * gap_ms >= least_ms:
                continue
            found = variant.improving.best_within(budget_bytes)
            if found is not None and found.time_ms < least_ms:
                best, least_ms = (variant, found), found.time_ms
        return best

    def best_within_each(
        self, budgets: Sequence[int], *, progress: bool = False
    ) -> dict[int, tuple[Variant, Candidate]]:
        """By the default strategy, for many budgets together: a schedule and whose it is, of those that fit and may not be in chunks.

        None where these are few.
        """
        least_bytes = self.plain.improving.minimum().peak_bytes
        whole = [budget for budget in budgets if not self._may_be_in_chunks(budget)]
        if sum(budget >= least_bytes for budget in whole) < _MANY:
            return {}
        found = self.plain.improving.best_within_each(whole, progress=progress)
        return {budget: (self.plain, candidate) for budget, candidate in found.items()}

    def _may_be_in_chunks(self, budget_bytes: int) -> bool:
        """Whether a plan for this budget may be one in chunks: where they are allowed for all, or where nothing else meets it."""
        whole = self.plain.improving
        if not self._allow_chunking and (
            whole.minimum().peak_bytes <= budget_bytes
            or whole.best_within(budget_bytes) is not None
        ):
            return False
        return bool(self._walks)

    def _first_within(self, budget_bytes: int) -> list[tuple[Variant, Candidate]]:
        """Schedules as captured and in chunks, none of them thoroughly improved, less those that cannot become the fastest."""
        whole = self.plain.improving.first_within(budget_bytes)
        found = [] if whole is None else [(self.plain, whole)]
        for walk in self._walks:
            known_ms = min((first.time_ms for _, first in found), default=inf)
            found += self._first_on(walk, budget_bytes, known_ms)
        return found

    def _first_on(
        self, walk: Sequence[Chunks], budget_bytes: int, known_ms: float
    ) -> Iterator[tuple[Variant, Candidate]]:
        """Those of one walk, which ends where smaller chunks promise nothing."""
        last_ms = inf
        ruled_out: LowerBound | None = None
        for way in walk:
            if self._chunk_bytes(way) > budget_bytes or (variant := self._variant(way)) is None:
                continue
            if variant.baseline.time_ms >= known_ms:
                return
            if variant.certificate.bound_ms(budget_bytes) >= known_ms:
                if ruled_out is not None and not _promises_more(
                    variant.certificate, ruled_out, budget_bytes
                ):
                    return
                ruled_out = variant.certificate
                continue
            first = variant.improving.first_within(budget_bytes)
            if first is None:
                continue
            yield variant, first
            if first.time_ms >= last_ms:
                return
            last_ms = first.time_ms
            known_ms = min(known_ms, last_ms)

    def bounds_within(self, budget_bytes: int) -> Bounds:
        """What no plan for this budget beats, of any strategy: that of the step as captured and of all chunks that it may run in."""
        if not self._may_be_in_chunks(budget_bytes):
            return self.plain.certificate
        return MinBound(partial(self._certificates, budget_bytes))

    def _certificates(self, budget_bytes: int) -> Iterator[LowerBound]:
        """Of the step as captured, and of each way to run in chunks that has not been ruled out by the size of a chunk."""
        yield self.plain.certificate
        for way in (way for walk in self._walks for way in walk):
            if (
                self._chunk_bytes(way) <= budget_bytes
                and (variant := self._variant(way)) is not None
            ):
                yield variant.certificate

    def minimum(self, strategy: str) -> Candidate:
        """The schedule of the smallest peak; in chunks only where they are allowed for more than what nothing else meets."""
        return (
            self.least(strategy) if self._allow_chunking else self.plain.search(strategy).minimum()
        )

    def least(self, strategy: str) -> Candidate:
        """The schedule of the smallest peak, in chunks if that is smaller."""
        best = self.plain.search(strategy).minimum()
        if strategy != _CHUNKING:
            return best
        for walk in self._walks:
            for way in reversed(walk):
                if (
                    self._chunk_bytes(way) >= best.simulation.peak_bytes
                    or (variant := self._variant(way)) is None
                ):
                    continue
                if variant.certificate.peak_bound_bytes >= best.simulation.peak_bytes:
                    break
                best = min(
                    best,
                    variant.search(strategy).minimum(),
                    key=lambda candidate: candidate.simulation.peak_bytes,
                )
        return best

    def frontier(self, strategy: str) -> list[tuple[int, Candidate]]:
        """Budgets and the best within them: growing budgets, falling times."""
        if not self._allow_chunking or strategy != _CHUNKING or not self._walks:
            return self.plain.search(strategy).frontier()
        budgets = linspace_int(
            self.least(strategy).simulation.peak_bytes,
            self.plain.baseline.peak_bytes,
            FRONTIER_POINTS,
        )

        def candidate_within(budget_bytes: int) -> Candidate | None:
            best = self.best_within(budget_bytes, strategy)
            return None if best is None else best[1]

        return nondominated(budgets, candidate_within)

    def notes(self, variant: Variant) -> ChunkingNotes:
        """How blocks that might run in chunks run in a variant."""
        return _NotesOnVariant(self, variant.step.options.get("loss_chunks"))

    @property
    def could(self) -> str:
        """Why a block that can run in chunks does not."""
        if not self.is_allowed:
            return _NOT_ALLOWED
        return (
            "it can be, and this budget is met without"
            if self._allow_chunking is None
            else "it can be, and would be no faster"
        )

    def of(self, options: Mapping[str, str]) -> CapturedStep:
        """The step that was captured, and put in chunks, with these options."""
        variants = (
            self.plain,
            *(variant for variant in self._known.values() if variant is not None),
        )
        known = next(
            (variant.step for variant in variants if dict(variant.step.options) == dict(options)),
            None,
        )
        if known is not None or "loss_chunks" not in options:
            return known or self.plain.step
        step = self.plain.step.in_chunks(Chunks.parse(options["loss_chunks"]))
        return self.plain.step if isinstance(step, Refusal) else step


@dataclass(frozen=True, slots=True)
class _NotesOnVariant:
    """Where the blocks are takes a copy of the graph to find, so it is not asked before somebody reads this.

    Attributes:
        variants: of the step.
        chunks: how blocks run in the one that the notes are on; None for all in one piece.
    """

    variants: Variants
    chunks: str | None

    @property
    def loss_block(self) -> ChunkingNote:
        """Whether that runs in chunks, and why."""
        block = self.variants.loss_block
        module = block.block if isinstance(block, Refusal) else block.name
        if self.chunks:
            return ChunkingNote(module=module, text=Chunks.parse(self.chunks).describe())
        return ChunkingNote(
            module=module, text=f"not in chunks: {self.variants.refusal or self.variants.could}"
        )

    @property
    def feed_forward(self) -> tuple[ChunkingNote, ...]:
        """The same of each large block that begins with a matrix product which widens its operand."""
        return tuple(map(self._feed_forward_note, self.variants.blocks.feed_forward))

    def _feed_forward_note(self, block: Region | Refusal) -> ChunkingNote:
        if isinstance(block, Refusal):
            return ChunkingNote(module=block.block, text=f"not in chunks: {block}")
        if self.chunks and (layers := Chunks.parse(self.chunks).layers) > 1:
            return ChunkingNote(module=block.name, text=f"in {layers} chunks of its rows")
        few = f"it has {block.num_rows} rows, too few for {_LAYER_CHUNKS} chunks of {_LEAST_ROWS}"
        could = self.variants.could if _is_long(block) or not self.variants.is_allowed else few
        return ChunkingNote(module=block.name, text=f"not in chunks: {could}")


def _promises_more(smaller: LowerBound, larger: LowerBound, budget_bytes: int) -> bool:
    """Whether smaller chunks lower the bound or the least peak; where they do not, still smaller ones seldom do."""
    return (
        smaller.bound_ms(budget_bytes) < larger.bound_ms(budget_bytes)
        or smaller.peak_bound_bytes < larger.peak_bound_bytes
    )


def _is_long(block: Region) -> bool:
    """Whether a feed-forward block has rows enough for chunks."""
    return block.num_rows >= _LAYER_CHUNKS * _LEAST_ROWS
