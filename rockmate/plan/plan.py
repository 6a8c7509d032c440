"""The plan: a schedule with what it promises, for a person to read, a file to hold and a module to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rockmate.bound.protocol import Bounds, StoredBound
from rockmate.budget import size_text
from rockmate.costs.cost import Costs
from rockmate.errors import PlanFileError, PlanMismatchError
from rockmate.graph.ir import Graph
from rockmate.graph.snapshot import SnapshotChain, SnapshotOp, StepSnapshot, StorageKind
from rockmate.plan import explain as explanation
from rockmate.plan.block_tree import BlockNode, PassThrough, block_tree, pass_through_values
from rockmate.plan.chunking_notes import ChunkingNote, ChunkingNotes, KnownNotes
from rockmate.plan.explain import BlockRow, Explanation, LiveBytes, tree_text
from rockmate.plan.residency import Residency
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import Simulation


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan:
    """A schedule that fits a budget.

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
        return Counter(self.schedule.steps[position] for position in self.schedule.repeated())

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

    def __repr__(self) -> str:
        """One line; `summary` says more, and `to_text` all."""
        return (
            f"Plan(budget {size_text(self.budget_bytes)}, predicted peak {size_text(self.predicted_peak_bytes)}, "
            f"{self.predicted_ratio:.3f}x the time of nothing recomputed)"
        )

    def summary(self) -> str:
        """A few lines: budget, peak and where it is, time, what is kept and what is recomputed."""
        recomputed = _most_recomputed(self)
        lines = [
            f"activation budget   {size_text(self.budget_bytes)}",
            f"predicted peak      {size_text(self.predicted_peak_bytes)}  ({_share(self.predicted_peak_bytes, self.baseline_peak_bytes)} "
            f"of {size_text(self.baseline_peak_bytes)} with nothing recomputed)",
            f"  reached in        {self.peak_place()}",
            f"predicted time      {self.predicted_ms:.1f} ms a step, {self.predicted_ratio:.3f}x of {self.baseline_ms:.1f} ms with "
            "nothing recomputed",
            *([f"  estimated for     {self.machine}"] if self.machine else []),
            f"kept for backward   {size_text(self.simulation.saved_bytes)}",
            f"recomputed          {self.schedule.num_recomputations()} of {len(self.snapshot.ops)} ops"
            + (f", most often {recomputed}" if recomputed else ""),
        ]
        leaves = self.block_tree.leaves()
        lines.append(
            f"blocks              {len(self.chain.blocks)}, the largest part of {max(len(part.forward) for part in leaves)} forward ops; "
            f"{len(self.pass_through_values)} storages pass blocks by, {self._kept_in_passing()}"
        )
        if "loss_chunks" in self.options:
            lines.append(
                f"loss block          {self.loss_block.text} ({self.loss_block.module or 'no single submodule'})"
            )
        if self.held_at_peak_bytes:
            lines.append(
                f'outputs             {size_text(self.held_at_peak_bytes)} of the peak are outputs beside the loss; with outputs="loss" '
                "they are planned like any other value"
            )
        if self.lower_bound_ms:
            lines.append(
                f"lower bound         {self.lower_bound_ms:.1f} ms within the budget; the plan is {self.optimality_gap:.1%} above"
            )
        if self.num_unproved_blocks:
            lines.append(
                f"solver              {self.num_unproved_blocks} answers not proved the best; a larger time_limit_s may help"
            )
        return "\n".join(lines)

    def _kept_in_passing(self) -> str:
        sizes = [
            (
                self.snapshot.storages[passage.storage].num_bytes,
                self.residency.kept(passage.storage),
            )
            for passage in self.pass_through_values
        ]
        return f"{size_text(sum(size for size, kept in sizes if kept))} of {size_text(sum(size for size, _ in sizes))} kept"

    # --- reports -------------------------------------------------------------------------------------------------------------

    def explain(self, name: str) -> Explanation:
        """What the plan does with one value, or with each value that a submodule's forward makes; `print` it.

        Args:
            name: a node of the captured graph ("gelu_1"), a parameter, buffer or input by its name, the path of a submodule, or a part as
                `tree` names it ("encoder.0 to encoder.3").

        Raises:
            UnknownNameError: the name is none of these; the text suggests ones like it, in whatever case it is written.
        """
        return explanation.explain(self, name)

    def block_rows(self) -> tuple[BlockRow, ...]:
        """What each block makes, keeps and recomputes, in forward order."""
        return explanation.block_rows(self)

    def block_table(self) -> str:
        """`block_rows` as a table."""
        return explanation.block_table(self)

    def tree(self) -> str:
        """The blocks as a tree by module path, with what each part makes, keeps and recomputes, and what passes blocks by."""
        return tree_text(self)

    def live_at_peak(self) -> list[LiveBytes]:
        """What is in memory at the peak, (description, bytes), largest first; the bytes add up to the predicted peak."""
        return explanation.live_at(self, self.simulation.peak_position)

    # --- files ---------------------------------------------------------------------------------------------------------------

    def to_text(self) -> str:
        """The plan as readable JSON, a run or an op a line; `from_text` reads it back."""
        from rockmate.plan.serialize import plan_text

        return plan_text(self)

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """The plan that `to_text` wrote.

        Raises:
            PlanFileError: the text is no plan, is cut off or damaged, or has a schedule that is not valid.
        """
        from rockmate.plan.serialize import read_plan

        return read_plan(text)

    def save(self, path: str | Path) -> None:
        """Writes `to_text` to a file."""
        Path(path).write_text(self.to_text(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan that `save` wrote; needs neither the model nor a solver.

        Raises:
            FileNotFoundError: there is no such file.
            PlanFileError: as for `from_text`.
        """
        from rockmate.plan.serialize import read_plan

        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            msg = f"{path} is no text: it is damaged, or no plan. Save the plan again."
            raise PlanFileError(msg) from error
        return read_plan(text, origin=str(path))


def _most_recomputed(plan: Plan) -> str:
    counts: dict[str, int] = {}
    for position in plan.schedule.repeated():
        name = plan.snapshot.ops[plan.schedule.steps[position]].short_call
        counts[name] = counts.get(name, 0) + 1
    top = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:4]
    return ", ".join(f"{name} x{count}" for name, count in top)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "all"
