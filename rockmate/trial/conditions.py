"""What a trial of a planned step has to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rockmate.ops.convolutions import column_bytes, convolution_in_slices
from rockmate.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a trial has to keep.

    Attributes:
        most_bytes: that the plain forward may hold, workspaces of kernels aside.
        largest_bytes: what one of its ops makes at most, as far as that is known.
        has_backward: whether no backward is needed but that of the step itself.
        most_copied_bytes: that copies may take while the step's own forward runs.
        is_exact: whether the step runs eager's kernels on whole tensors, so that bits are equal.
        only_loss: whether the step returns the loss alone.
        is_captured: whether the step was captured, without key/value caches and checkpoints.
        takes_gradient: whether the captured forward takes a gradient itself.
        what: the step, in words.
    """

    most_bytes: int
    largest_bytes: int = 0
    has_backward: bool = True
    most_copied_bytes: int
    is_exact: bool
    only_loss: bool = False
    is_captured: bool = False
    takes_gradient: bool = False
    what: str = "the planned step"


def conditions_of(plan: Plan, *, is_laid_out: bool) -> Conditions:
    """Those of a step that runs a plan.

    Any op of the plain forward may take the largest workspace of the plan's, and is not to pass the
    budget.

    Args:
        plan: the plan.
        is_laid_out: whether the inputs have the layouts of the sample, so that kernels are the
            same.
    """
    options, graph, simulation = plan.options, plan.graph, plan.simulation
    overheads = plan.costs.first_arrays.overhead_bytes
    workspace = max((int(overheads[op.index]) for op in graph.forward_ops), default=0)
    for node in (op.node for op in graph.ops if op.node.target is convolution_in_slices):
        weight: Any = node.args[1]  # the plain forward makes all columns together
        workspace = max(workspace, column_bytes(node.meta["val"], weight.meta["val"]))
    largest = max(
        (
            max(op.written_bytes, *(each.num_bytes for each in op.reads if not each.is_static), 0)
            for op in graph.ops
        ),
        default=0,
    )
    if options.kernels == "fused":  # the plain forward runs ops that the plan does not
        workspace = max(workspace, largest)
    if chunks := options.loss_chunks:
        number = max(chunks.number, chunks.layers)
        largest, workspace = largest * number, workspace * number
    during_forward = simulation.live_bytes[: len(plan.schedule.forward)]
    is_on_cpu = all(op.device.type == "cpu" for op in graph.forward_ops)
    repeats = is_laid_out and (is_on_cpu or torch.are_deterministic_algorithms_enabled())
    return Conditions(
        most_bytes=plan.budget_bytes - workspace,
        largest_bytes=largest,
        most_copied_bytes=plan.budget_bytes - max(during_forward, default=0),
        is_exact=repeats and options.are_exact,
        only_loss=options.outputs == "loss",
        is_captured=True,
    )
