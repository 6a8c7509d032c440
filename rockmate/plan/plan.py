"""`Plan`: the public face of a plan record, with its reports and its files."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from rockmate._util import write_whole
from rockmate.errors import PlanFileError
from rockmate.plan import block_table as block_tables
from rockmate.plan import explain as explanations
from rockmate.plan.block_table import BlockRow, LiveBytes, live_at, table_text
from rockmate.plan.explain import Explanation
from rockmate.plan.record import PlanRecord
from rockmate.plan.serialize import plan_text, read_plan
from rockmate.plan.summary import line_of, summary_text


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan(PlanRecord):
    """A schedule that fits a budget, with the memory and the time that it promises.

    `Planner.plan` and `RockmateModule` make plans. A plan is data: it can be printed, compared and
    saved without the model. `PlanRecord` lists its attributes.

    >>> plan = Planner(model, sample_input).plan("6GiB")               # doctest: +SKIP
    >>> print(plan.summary())                                          # doctest: +SKIP
    >>> plan.save("plan.json")                                         # doctest: +SKIP
    """

    def __repr__(self) -> str:
        return f"Plan({line_of(self)})"

    # --- reports ------------------------------------------------------------------------------

    def summary(self) -> str:
        """A few lines: budget, peak, time, saved and recomputed values, lower bound."""
        return summary_text(self)

    def explain(self, name: str) -> Explanation:
        """What the plan does with one value, or with the values of a submodule; `print` it.

        Args:
            name: a node of the captured graph ("gelu_1"), a parameter, buffer or input by its name,
                the path of a submodule, or a part as `tree` names it ("encoder.0 to encoder.3").

        Raises:
            UnknownNameError: the name is none of these; the text suggests similar ones, whatever
                their case.
        """
        return explanations.explain(self, name)

    def block_rows(self) -> tuple[BlockRow, ...]:
        """What each block makes, saves and recomputes, in forward order."""
        return block_tables.block_rows(self)

    def block_table(self) -> str:
        """`block_rows` as a table, below a row of the whole model."""
        return table_text(self, is_tree=False)

    def tree(self) -> str:
        """The blocks as a tree by module path, each part with its row of that table."""
        return table_text(self, is_tree=True)

    def live_at_peak(self) -> list[LiveBytes]:
        """Everything in memory at the peak, as (description, bytes), largest first.

        The bytes add up to the predicted peak.
        """
        return live_at(self, self.simulation.peak_position)

    # --- files --------------------------------------------------------------------------------

    def to_text(self) -> str:
        """The plan as readable JSON, a run or an op a line; `from_text` reads it."""
        return plan_text(self)

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """The plan that `to_text` wrote.

        Raises:
            PlanFileError: the text is no plan, is cut off or damaged, or has an invalid schedule.
        """
        return cls._of(read_plan(text))

    def save(self, path: str | Path) -> None:
        """Writes `to_text` to a file; one that is there stays until the text is whole."""
        write_whole(path, self.to_text())

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
