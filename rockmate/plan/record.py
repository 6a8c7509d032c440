"""A plan as data: a schedule, what it promises, and what follows from the two.

Reports, files and the tree of blocks read a `PlanRecord`. `Plan` adds the methods that call them.
Nothing here needs a model, a graph or a solver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rockmate.costs.cost import Costs
from rockmate.errors import PlanMismatchError
from rockmate.fusion.report import FusionReport
from rockmate.graph.ir import Graph
from rockmate.graph.snapshot import SnapshotChain, StepSnapshot, StorageKind
from rockmate.graph.step_options import StepOptions
from rockmate.plan.block_tree import BlockNode, block_tree
from rockmate.plan.residency import Residency
from rockmate.schedule.flights import Flights, flights_of, overlapped_ms
from rockmate.schedule.offload_request import OffloadRequest
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import Simulation

# Outputs beside the loss are reported if they take at least one part in so many of the peak.
_REPORTED_OUTPUTS_PART = 10
# Sums of the same times in another order differ by less than this fraction: 10,000 ops at 1e-16
# each leave it a wide margin.
_ROUNDING = 1e-9

_TIERS = {"host": "host memory", "disk": "the disk"}

PlanStatus = Literal["optimal", "within_gap", "time_limit", "stalled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingNote:
    """How one block runs that may run in chunks.

    Attributes:
        module: path of the submodule with which the block begins, empty if unknown. Of several
            loss blocks, the paths with commas between them.
        text: the number of chunks and their form, or the reason for none.
    """

    module: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingNotes:
    """How the blocks of one step run that may run in chunks.

    Attributes:
        loss_block: the note of the loss blocks.
        feed_forward: the notes of large blocks that begin with a matrix product which widens its
            operand.
        bitwise_ms: time of the fastest schedule found without chunks; infinite if none fits the
            budget. None if the step runs without, or if that is unknown.
    """

    loss_block: ChunkingNote = ChunkingNote()
    feed_forward: tuple[ChunkingNote, ...] = ()
    bitwise_ms: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PlanRecord:
    """A schedule that fits a budget, as data.

    A loaded plan is a plan like any other, but has no `graph` until it is given to a model with
    `RockmateModule(model, sample_input, plan=plan)`.

    Attributes:
        budget_bytes: the activation budget. It bounds the bytes allocated beyond those at the call
            of the forward, at every moment of the step. Gradients at rest in `.grad` do not count;
            outputs count until the backward has ended.
        predicted_peak_bytes: the simulator's peak, counted in the same way; at most the budget.
        predicted_ms: time of one forward and backward, the sum of measured or estimated op times.
        baseline_peak_bytes: the peak without recomputation.
        baseline_ms: the time without recomputation.
        minimum_peak_bytes: `Planner.minimum_peak_bytes` of the planner that made the plan. A plan
            for another sample or strategy can be below it, and so can a plan in chunks.
        schedule: the order in which ops run.
        simulation: live bytes at every run.
        costs: time and workspace of every op.
        snapshot: the captured step as plain values, which the indices in the schedule refer to.
        chain: the blocks of the step.
        options: how the step was captured, and runs: in chunks, with fused kernels.
        strategy: name of the strategy that made the plan.
        bound: the lower bound on the time of schedules, in milliseconds, or what finds it for a
            budget; see `lower_bound_ms`.
        num_unproved_blocks: 1 for a plan of "checkmate" without a proof of optimality: stopped at
            its time limit, or made for a smaller budget; else 0.
        gap_tolerance: distance to the lower bound, as a fraction of the baseline's time, at which
            the search stopped looking for faster schedules.
        is_cut_short: whether the search ran out of time; see `status`.
        machine: name of the machine that times were estimated for; None if they were measured.
        find_notes: finds how blocks run that may run in chunks; see `chunking_notes`.
        fusion: what fusing groups of ops has brought; None where they run one by one, and for a
            loaded plan.
        offload: where values may move; None if none may.
        captured: the graph behind `snapshot`; None for a loaded plan.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    predicted_ms: float
    baseline_peak_bytes: int
    baseline_ms: float
    minimum_peak_bytes: int
    schedule: Schedule
    simulation: Simulation
    costs: Costs
    snapshot: StepSnapshot
    chain: SnapshotChain
    options: StepOptions
    strategy: str = "rockmate"
    bound: float | Callable[[int], float] = 0.0
    num_unproved_blocks: int = 0
    gap_tolerance: float = 1e-3
    is_cut_short: bool = False
    machine: str | None = None
    find_notes: Callable[[], ChunkingNotes] = ChunkingNotes
    fusion: FusionReport | None = None
    offload: OffloadRequest | None = None
    captured: Graph | None = None

    @property
    def graph(self) -> Graph:
        """The captured graph.

        Raises:
            PlanMismatchError: the plan was loaded, and has not been given to a model.
        """
        if self.captured is None:
            raise PlanMismatchError(
                "this plan was read from a file and has no graph. "
                "RockmateModule(model, sample_input, plan=plan).plan has one."
            )
        return self.captured

    # --- collectives --------------------------------------------------------------------------

    @cached_property
    def flights(self) -> Flights:
        """Collectives that run beside other ops. They follow from schedule, costs and peak."""
        if self.schedule.copies:  # collectives stay where they stand beside moves
            return Flights()
        return flights_of(self.graph, self.schedule, self.costs, self.simulation)

    @cached_property
    def overlapped_ms(self) -> float:
        """`predicted_ms` less the time in which collectives run beside other ops.

        The link is assumed to take one collective at a time, and no time from other ops. Needs the
        graph: a loaded plan has it once it is given to a model.
        """
        return overlapped_ms(self.graph, self.schedule, self.costs, self.flights)

    # --- promises -----------------------------------------------------------------------------

    @property
    def predicted_ratio(self) -> float:
        """Predicted time over the time without recomputation."""
        return self.predicted_ms / self.baseline_ms if self.baseline_ms else 1.0

    @cached_property
    def lower_bound_ms(self) -> float:
        """A time that no schedule within the budget beats; 0 if nothing is proved.

        It holds for the schedules of the step as captured and, where the planner may choose chunks
        for this budget, for those of the step in any number and form of chunks that it knows. A
        planner's first read then takes seconds, because the step is rewritten for each number of
        chunks. A loaded plan has the bound that was stored.
        """
        return self.bound(self.budget_bytes) if callable(self.bound) else self.bound

    @property
    def optimality_gap(self) -> float:
        """Distance to `lower_bound_ms`, as a share of the time without recomputation."""
        gap_ms = self.predicted_ms - self.lower_bound_ms
        return gap_ms / self.baseline_ms if self.baseline_ms else 0.0

    @cached_property
    def status(self) -> PlanStatus:
        """Why the search ended, by `lower_bound_ms`.

        | status | the plan |
        |---|---|
        | "optimal" | takes the time of the lower bound |
        | "within_gap" | is within `gap_tolerance` of it |
        | "time_limit" | is what the search had found when its time was over |
        | "stalled" | is further away, and the search has nothing more to try |

        The last two may be optimal as well: the bound does not prove it.
        """
        gap_ms = self.predicted_ms - self.lower_bound_ms
        if gap_ms <= _ROUNDING * self.baseline_ms:
            return "optimal"
        if gap_ms <= self.gap_tolerance * self.baseline_ms:
            return "within_gap"
        return "time_limit" if self.is_cut_short else "stalled"

    # --- chunks -------------------------------------------------------------------------------

    @cached_property
    def chunking_notes(self) -> ChunkingNotes:
        """How blocks run that may run in chunks. To find it may take seconds."""
        return self.find_notes()

    @property
    def loss_block(self) -> ChunkingNote:
        """Whether the loss block runs in chunks, and why."""
        return self.chunking_notes.loss_block

    @property
    def feed_forward(self) -> tuple[ChunkingNote, ...]:
        """The same for large blocks that begin with a matrix product which widens its operand."""
        return self.chunking_notes.feed_forward

    @property
    def bitwise_ms(self) -> float | None:
        """Time of the fastest plan found without chunks and moves; infinite if none fits.

        What bitwise gradients would take within the budget. None if the plan is not in chunks. The
        first read may take seconds.
        """
        return self.chunking_notes.bitwise_ms

    # --- blocks and values --------------------------------------------------------------------

    @cached_property
    def residency(self) -> Residency:
        """The live intervals of all values."""
        return Residency(self.snapshot, self.schedule)

    @cached_property
    def block_tree(self) -> BlockNode:
        """The blocks as a tree by module path."""
        return block_tree(self.snapshot, self.chain)

    @cached_property
    def recompute_counts(self) -> Counter[int]:
        """Number of recomputations of each op, by index."""
        steps = self.schedule.steps
        return Counter(steps[position] for position in self.schedule.recomputed_positions())

    def made_by(self, ops: Iterable[int]) -> list[int]:
        """Indices of the storages that the forward ops among `ops` make."""
        described = (self.snapshot.ops[index] for index in ops)
        return [storage for op in described if op.phase == "forward" for storage in op.writes]

    def bytes_of(self, storages: Iterable[int]) -> int:
        """Bytes of some storages."""
        return sum(self.snapshot.storages[storage].num_bytes for storage in storages)

    @property
    def tier_name(self) -> str:
        """The tier that values move to, in words."""
        return _TIERS[self.offload.kind] if self.offload else "another memory tier"

    # --- the peak -----------------------------------------------------------------------------

    @cached_property
    def highest_bytes(self) -> dict[int, int]:
        """For each op that runs, by index, the most bytes in memory while it runs."""
        highest: dict[int, int] = {}
        runs = zip(self.schedule.steps, self.simulation.live_bytes, strict=True)
        for index, live_bytes in runs:
            highest[index] = max(highest.get(index, 0), live_bytes)
        return highest

    def peak_place(self) -> str:
        """The run at the peak, in words."""
        position = self.simulation.peak_position
        op = self.snapshot.ops[self.schedule.steps[position]]
        is_backward = position >= len(self.schedule.forward)
        half = "backward" if is_backward else "forward"
        is_recomputation = op.phase == "forward" and is_backward
        run = "the recomputation of " if is_recomputation else ""
        return f"{run}{op.name} ({op.module or 'no single submodule'}) in the {half}"

    @property
    def held_at_peak_bytes(self) -> int:
        """Bytes of outputs at the peak; 0 unless some are returned beside the loss and they matter.

        They matter from a tenth of the peak.
        """
        storages, ops = self.snapshot.storages, self.snapshot.ops
        outputs = {i for i, storage in enumerate(storages) if storage.kind is StorageKind.OUTPUT}
        if len(outputs) < 2 or self.options.outputs != "all":
            return 0
        runs = self.schedule.steps[: self.simulation.peak_position + 1]
        held = outputs.intersection(storage for index in runs for storage in ops[index].writes)
        held_bytes = sum(storages[index].num_bytes for index in held)
        is_reported = _REPORTED_OUTPUTS_PART * held_bytes >= self.predicted_peak_bytes
        return held_bytes if is_reported else 0
