"""TODO: runtime.planned_call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from rockmate.capture.signature import (
    CallSignature,
    ModelSignature,
)
from rockmate.capture.structure import Structure
from rockmate.plan.plan import Plan
from rockmate.runtime.emit import Program


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedCall:
    """A plan with what it takes to run it, apart from the module.

    Attributes:
        plan_of: makes the plan when it is first asked for; running needs the program alone.
        program: its two functions.
        call: signature of the calls that it serves.
        state: of the module that it was made for.
        output_structure: rebuilds the model's output from its tensors.
        non_differentiable_outputs: indices of those that have a gradient in eager and none in the plan; see `cut_output`.
    """

    plan_of: Callable[[], Plan]
    program: Program
    call: CallSignature
    state: ModelSignature
    output_structure: Structure
    non_differentiable_outputs: tuple[int, ...]

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        return self.plan_of()
