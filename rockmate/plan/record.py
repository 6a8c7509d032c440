"""A plan as data: the schedule, what it promises, and what follows from the two.

`explain`, `serialize` and the tree of blocks read a record. `Plan` adds the methods that call them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rockmate.bound.protocol import Bounds, StoredBound
from rockmate.costs.cost import Costs
from rockmate.errors import PlanMismatchError
from rockmate.graph.ir import Graph
from rockmate.graph.snapshot import SnapshotChain, SnapshotOp, StepSnapshot, StorageKind
from rockmate.plan.block_tree import BlockNode, PassThrough, block_tree, pass_through_values
from rockmate.plan.chunking_notes import ChunkingNote, ChunkingNotes, KnownNotes
from rockmate.plan.residency import Residency
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import Simulation


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PlanRecord:
    """A schedule that fits a budget, as data; `Plan` adds texts and files.

    A plan that was loaded is one like any other, but for `graph`: `RockmateModule(model, sample_input, plan=plan)` captures the model
    and gives it one.

    Attributes:
        budget_bytes: the activation budget: bounds what is allocated beyond what was there when the forward was called, at every
            moment of the step, gradients at rest in `.grad` not counted, outputs counted until the backward has ended.
        predicted_peak_bytes: the simulator's peak, counted in the same way; at most the budget.
        predicted_ms: one forward and backward, the sum of measured or estimated op times.
        baseline_peak_bytes: the peak with nothing recomputed.
        baseline_ms: the time with nothing recomputed.
        minimum_peak_bytes: `Planner.minimum_peak_bytes` of the planner that made it; a plan in chunks, which that may leave out, can be
            below, and so can one for another sample or strategy.
        schedule: the order in which ops run.
        simulation: live bytes at every run.
        costs: time and overhead of every op.
        snapshot: what the schedule's indices mean: the captured step as plain values.
        chain: its blocks.
        options: how the step was captured: "differentiable", "outputs", "gradients", and "loss_chunks" where the loss block is in chunks.
        strategy: what made the plan.
        bounds: what it is held against; see `lower_bound_ms`.
        num_unproved_blocks: solves whose answer may not be the best: stopped at their time limit, or made for a smaller budget.
        machine: for which the times were estimated; None where they were measured.
        chunking_notes: how blocks run that might run in chunks; see `loss_block` and `feed_forward`.
        captured: the graph that the outline describes, None for a plan that was loaded.
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
    options: Mapping[str, str]
    strategy: str = "rockmate"
    bounds: Bounds = field(default_factory=StoredBound)
    num_unproved_blocks: int = 0
    machine: str | None = None
    chunking_notes: ChunkingNotes = field(default_factory=KnownNotes)
    captured: Graph | None = None

    @property
    def graph(self) -> Graph:
        """The captured graph.

        Raises:
            PlanMismatchError: the plan was loaded, and has not been given to a model.
        """
        if self.captured is None:
            msg = "this plan was read from a file and has no graph. RockmateModule(model, sample_input, plan=plan).plan has one."
            raise PlanMismatchError(msg)
        return self.captured

    @cached_property
    def residency(self) -> Residency:
        """When each storage is in memory."""
        return Residency(self.snapshot, self.schedule)

    @cached_property
    def block_tree(self) -> BlockNode:
        """Its blocks as a tree by module path."""
        return block_tree(self.snapshot, self.chain)

    @cached_property
    def pass_through_values(self) -> list[PassThrough]:
        """The storages that pass blocks by, largest first."""
        return pass_through_values(self.snapshot, self.chain)

    @cached_property
    def recompute_counts(self) -> Counter[int]:
        """How often each op runs again, by index."""
        return Counter(
            self.schedule.steps[position] for position in self.schedule.recomputed_positions()
        )

    @cached_property
    def highest_bytes(self) -> dict[int, int]:
        """Most bytes in use, of the whole step, while an op runs, by its index."""
        highest: dict[int, int] = {}
        for position, index in enumerate(self.schedule.steps):
            highest[index] = max(highest.get(index, 0), self.simulation.live_bytes[position])
        return highest

    def is_recomputed(self, storage: int) -> bool:
        """Whether the op that makes a storage runs more than once."""
        return any(
            self.recompute_counts[index]
            for index, op in enumerate(self.snapshot.ops)
            if storage in op.writes
        )

    @property
    def loss_block(self) -> ChunkingNote:
        """Whether the loss block runs in chunks, and why."""
        return self.chunking_notes.loss_block

    @property
    def feed_forward(self) -> tuple[ChunkingNote, ...]:
        """The same of each large block that begins with a matrix product which widens its operand."""
        return self.chunking_notes.feed_forward

    @property
    def predicted_ratio(self) -> float:
        """Predicted time over that of no recomputation."""
        return self.predicted_ms / self.baseline_ms if self.baseline_ms else 1.0

    @cached_property
    def lower_bound_ms(self) -> float:
        """No schedule within the budget takes less; 0 where nothing is proved. Worked out when it is first read, which may take 20 s.

        Meant are the schedules of the step as captured and, where the planner may choose chunks for this budget, of the step in any of the
        numbers and forms of chunks that planning knows: `Planner.lower_bound_ms`. A plan that was loaded has what was stored.
        """
        return self.bounds.tight_bound_ms(self.budget_bytes)

    @property
    def quick_lower_bound_ms(self) -> float:
        """As `lower_bound_ms`, or below it near the smallest peak: for many budgets.

        Milliseconds of work; where chunks may be chosen, seconds for a planner's first such plan, which writes out the step in each.
        """
        return self.bounds.bound_ms(self.budget_bytes)

    @property
    def optimality_gap(self) -> float:
        """How far the plan may be from the fastest schedule that `lower_bound_ms` is for, as a share of the time of no recomputation."""
        return (
            (self.predicted_ms - self.lower_bound_ms) / self.baseline_ms
            if self.baseline_ms
            else 0.0
        )

    @property
    def peak_op(self) -> SnapshotOp:
        """The op that runs when the peak is reached."""
        return self.snapshot.ops[self.schedule.steps[self.simulation.peak_position]]

    @property
    def held_at_peak_bytes(self) -> int:
        """Bytes of outputs beside the loss that are held at the peak, if they are a tenth of it or more; else 0."""
        outputs = [
            index
            for index, storage in enumerate(self.snapshot.storages)
            if storage.kind is StorageKind.OUTPUT
        ]
        made = {
            index
            for run in self.schedule.steps[: self.simulation.peak_position + 1]
            for index in self.snapshot.ops[run].writes
        }
        held = sum(self.snapshot.storages[index].num_bytes for index in outputs if index in made)
        return (
            held
            if len(outputs) > 1
            and self.options.get("outputs") == "all"
            and 10 * held >= self.predicted_peak_bytes
            else 0
        )

    def peak_place(self) -> str:
        """Where the peak is, in words."""
        op = self.peak_op
        half = (
            "backward" if self.simulation.peak_position >= len(self.schedule.forward) else "forward"
        )
        recompute = "the recomputation of " if op.phase == "forward" and half == "backward" else ""
        return f"{recompute}{op.name} ({op.module or 'no single submodule'}) in the {half}"
