"""The steps of a model for calls that are alike but for the sizes of their tensors, from one symbolic capture where it serves."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from torch import nn

from rockmate.collector import collection_put_off
from rockmate.errors import InvalidSampleError, UnsupportedModelError
from rockmate.outline import outline_of
from rockmate.signature import CallSignature, SampleCall
from rockmate.source_lines import source_lines
from rockmate.symbolic import SizeGroups, SizesNotCoveredError, SymbolicCapture

if TYPE_CHECKING:
    from rockmate.module import PlannedCall
    from rockmate.step import CapturedStep

logger = logging.getLogger("rockmate")


class StepFamily:
    """Captures a model for other sizes than those that it was planned for, as long as its state is that of the plan.

    The first call of other sizes is worth a symbolic capture, which takes several times as long as one of fixed sizes and then serves
    every other, unless it differs in the batch alone: that is the last one of an epoch, and captured as it is. The symbolic capture is
    held against the planned step at that one's own sizes and used only if the two are equal. Where it cannot be made, is not equal or
    says nothing of the sizes at hand, each set of sizes is captured by itself, and the log says why.
    """

    def __init__(self, model: nn.Module, planned: PlannedCall) -> None:
        """Takes a model and the planned call whose step is known."""
        self._model = model
        self._planned = planned
        self._groups = SizeGroups.of(planned.call)
        self._symbolic: SymbolicCapture | None = None
        self._obstacle = ""  # why there is no symbolic capture
        self._has_other_batch = False

    def step(self, sample: SampleCall, call: CallSignature) -> CapturedStep:
        """The model's step for a call that differs from the planned one in sizes.

        Args:
            sample: the call.
            call: its signature.

        Raises:
            InvalidSampleError, UnsupportedModelError: as for `capture_step`.
        """
        from rockmate.step import capture_step

        with collection_put_off():
            try:
                return self._instance(call)
            except SizesNotCoveredError as reason:
                logger.info("captured for these sizes alone, since %s: %s", reason, call)
            options: dict[str, Any] = dict(self._planned.plan.options)
            return capture_step(self._model, sample, **options)

    def _instance(self, call: CallSignature) -> CapturedStep:
        groups = self._groups.refined(call)
        groups.check_symbolic(self._planned.call, call)
        if self._symbolic is None and not self._has_other_batch and _differs_in_batch(self._planned.call, call):
            self._has_other_batch = True
            raise SizesNotCoveredError("one smaller or larger batch is not worth a symbolic capture")
        if groups != self._groups:  # a symbol stood for sizes that differ now
            self._groups, self._symbolic = groups, None
        if self._symbolic is None:
            self._symbolic = self._capture()
        return self._step_of(self._symbolic, call)

    def _capture(self) -> SymbolicCapture:
        """A symbolic capture that equals the planned step at that one's sizes."""
        if self._obstacle:
            raise SizesNotCoveredError(self._obstacle)
        begin = time.perf_counter()
        try:
            symbolic = self._equal_capture()
        except (InvalidSampleError, UnsupportedModelError, SizesNotCoveredError) as error:
            self._obstacle = f"no symbolic capture serves this model ({error})"
            raise SizesNotCoveredError(self._obstacle) from error
        seconds = time.perf_counter() - begin
        logger.info("captured with symbolic sizes in %.1f s: batches of other sizes need no further capture", seconds)
        return symbolic

    def _equal_capture(self) -> SymbolicCapture:
        planned, options = self._planned, self._planned.plan.options
        with source_lines():
            symbolic = SymbolicCapture(
                self._model, planned.call, self._groups, differentiable=options["differentiable"], outputs=options["outputs"]
            )
        step = self._step_of(symbolic, planned.call)
        difference = planned.plan.outline.difference(outline_of(step.graph, planned.call))
        if difference:
            raise SizesNotCoveredError(f"at the sample's sizes it is another graph: {difference}")
        return symbolic

    def _step_of(self, symbolic: SymbolicCapture, call: CallSignature) -> CapturedStep:
        from rockmate.step import step_of

        return step_of(symbolic.instance(call), self._model, call, self._planned.state, dict(self._planned.plan.options))


def _differs_in_batch(planned: CallSignature, call: CallSignature) -> bool:
    """Whether the calls differ in the leading dimension of their tensors alone."""
    return all(mine.shape[1:] == theirs.shape[1:] for mine, theirs in zip(planned.tensors, call.tensors, strict=True))
