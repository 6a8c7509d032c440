"""What the log says of checkpoints in a model's code and of marks."""

from __future__ import annotations

from rockmate.capture.checkpoint_regions import log_lifted
from rockmate.graph.mark_request import ExistingCheckpoints, MarkRequest
from rockmate.graph.marking import log_uncovered
from rockmate.step import CapturedStep


def log_marks(step: CapturedStep, existing_checkpoints: ExistingCheckpoints) -> None:
    """Names checkpoints that a plan replaces, and marks that cover no value."""
    if existing_checkpoints == "lift":
        log_lifted(step.model, step.capture.num_checkpoints)
    log_uncovered(step.graph, MarkRequest.of_options(step.options))
