"""The plan: a schedule with what it promises, for a person to read, a file to hold and a module to run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from rockmate.budget import size_text
from rockmate.errors import PlanFileError
from rockmate.plan import explain as explanation
from rockmate.plan.explain import BlockRow, Explanation, LiveBytes, tree_text
from rockmate.plan.record import PlanRecord
from rockmate.plan.serialize import plan_text, read_plan


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan(PlanRecord):
    """A schedule that fits a budget; see `PlanRecord` for its attributes."""

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
                self.residency.is_saved(passage.storage),
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
        return plan_text(self)

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """The plan that `to_text` wrote.

        Raises:
            PlanFileError: the text is no plan, is cut off or damaged, or has a schedule that is not valid.
        """
        return cls._of(read_plan(text))

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
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            msg = f"{path} is no text: it is damaged, or no plan. Save the plan again."
            raise PlanFileError(msg) from error
        return cls._of(read_plan(text, origin=str(path)))

    @classmethod
    def _of(cls, record: PlanRecord) -> Plan:
        return cls(**{each.name: getattr(record, each.name) for each in fields(record)})


def _most_recomputed(plan: PlanRecord) -> str:
    counts: dict[str, int] = {}
    for position in plan.schedule.recomputed_positions():
        name = plan.snapshot.ops[plan.schedule.steps[position]].short_call
        counts[name] = counts.get(name, 0) + 1
    top = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:4]
    return ", ".join(f"{name} x{count}" for name, count in top)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "all"
