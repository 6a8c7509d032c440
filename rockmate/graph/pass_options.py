"""What passes over the graphs of a step must know beside the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rockmate.graph.ir import Graph
from rockmate.graph.mark_request import NO_MARKS, MarkRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """The options of passes.

    Attributes:
        hooked: names of the parameters with a tensor hook, or with several gradients.
        owner_of: for each parameter's name, the first name of the same tensor.
        like: the planned graph of the same step at sizes that are nowhere smaller, if there is one.
        marks: what the user marks.
        keeps_inputs: whether inputs stay as they are until the backward.
        runs_here: whether the step runs on this machine, at these sizes.
    """

    hooked: tuple[str, ...] = ()
    owner_of: Mapping[str, str] = field(default_factory=dict)
    like: Graph | None = None
    marks: MarkRequest = NO_MARKS
    keeps_inputs: bool = False
    runs_here: bool = False

    @property
    def hooked_owners(self) -> set[str]:
        """The first names of the hooked parameters."""
        return {self.owner_of[name] for name in self.hooked}
