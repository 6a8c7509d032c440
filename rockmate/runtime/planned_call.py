"""What planning hands to the runtime: a plan and the code that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from rockmate.capture.forward_attributes import ForwardAttributes
from rockmate.capture.model_signature import ModelSignature
from rockmate.capture.read_values import ReadValues
from rockmate.capture.signature import CallSignature
from rockmate.capture.structure import Structure
from rockmate.plan.plan import Plan
from rockmate.runtime.program import Program


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedCall:
    """A plan and its code, independent of the module that runs them.

    Attributes:
        plan_of: makes the plan at its first use; running needs the program alone.
        program: the forward and backward functions.
        call: signature of the calls that the program serves.
        state: signature of the module that it was made for.
        output_structure: rebuilds the model's output from its tensors.
        non_differentiable_outputs: indices of outputs with a gradient in eager and none in the
            plan; see `rockmate.runtime.undefined_tangents`.
        attributes: what the forward reads and leaves behind in attributes.
        read_values: values of tensors that it reads.
    """

    plan_of: Callable[[], Plan]
    program: Program
    call: CallSignature
    state: ModelSignature
    output_structure: Structure
    non_differentiable_outputs: tuple[int, ...]
    attributes: ForwardAttributes
    read_values: ReadValues

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        return self.plan_of()
