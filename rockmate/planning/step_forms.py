"""A step in several forms, of which plans take one: with or without chunks, with other kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rockmate.bound.protocol import Bounds
from rockmate.graph.step_options import StepOptions
from rockmate.plan.chunking_notes import ChunkingNotes
from rockmate.planning.candidate import Candidate
from rockmate.planning.variant import Variant
from rockmate.step import CapturedStep


class StepForms(Protocol):
    """What a planning session asks of the forms of its step.

    Attributes:
        unchunked: the step as captured, op by op where there is a choice of kernels.
    """

    unchunked: Variant

    def step_for(self, options: StepOptions) -> CapturedStep:
        """The form that was captured with these options."""
        ...

    def notes(self, variant: Variant, budget_bytes: int) -> ChunkingNotes:
        """How the chunkable blocks run in a form."""
        ...

    def best_within(self, budget_bytes: int, strategy: str) -> tuple[Variant, Candidate] | None:
        """The fastest schedule found within the budget, and its form; None if none fits."""
        ...

    def best_within_each(
        self, budgets: Sequence[int], *, progress: bool = False
    ) -> dict[int, tuple[Variant, Candidate]]:
        """The schedules of the default strategy for many budgets, planned together."""
        ...

    def frontier(self, strategy: str) -> list[tuple[int, Candidate]]:
        """The least time found, from the smallest peak to the baseline's."""
        ...

    def bounds_within(self, budget_bytes: int) -> Bounds:
        """Lower bounds that hold for all forms that a plan may take within a budget."""
        ...

    def minimum(self, strategy: str) -> Candidate:
        """The schedule of the smallest peak that is the same at any times, without chunks."""
        ...

    def min_peak(self, strategy: str) -> Candidate:
        """The schedule of the smallest peak of all forms."""
        ...
