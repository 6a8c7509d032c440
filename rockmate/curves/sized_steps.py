"""The step of a model at any size, from one symbolic capture where that can be made."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch import nn

from rockmate._util import gc_paused
from rockmate.capture.checkpoint_regions import log_lifted
from rockmate.capture.model_signature import ModelSignature
from rockmate.capture.opaque_module import opaque_modules
from rockmate.capture.provenance import source_lines
from rockmate.capture.roles import Capture
from rockmate.capture.sample import Sample
from rockmate.capture.signature import CallSignature
from rockmate.capture.size_template import MIN_SYMBOLIC_SIZE, SizesNotCoveredError
from rockmate.capture.symbolic import GenericCapture, SymbolicCapture
from rockmate.costs.machine import Machine
from rockmate.curves.size_axis import SizeAxis
from rockmate.errors import InvalidSampleError, UnsupportedModelError
from rockmate.graph.hooked_gradients import shared_names
from rockmate.graph.parameters import owner_names
from rockmate.graph.passes import JOINT_PASSES, REWRITES, run_passes
from rockmate.graph.step_options import StepOptions
from rockmate.planning.step import CapturedStep, capture_step, hooked_of, step_of

logger = logging.getLogger(__name__)


class SizedSteps:
    """The steps of one model that differ in one size.

    The symbolic capture has one symbol, for that size. Where there is none, and at sizes that it
    does not cover, as 1, the step is captured by itself.

    Attributes:
        num_captures: how many times the model was traced.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Sample,
        sample_input: Any,
        axis: SizeAxis,
        machine: Machine,
        options: StepOptions,
    ) -> None:
        self._model = model
        self._sample = sample
        self._sample_input = sample_input
        self._axis = axis
        self._machine = machine
        self._options = options
        self._symbolic: SymbolicCapture | None = None
        self._generic: GenericCapture | None = None
        # Parameters to which several gradients flow, where these are added to each other first.
        self._shared: frozenset[str] = frozenset()
        apart = list(opaque_modules(model, options.untraced))
        # A policy may read sizes, so it is asked at each.
        self._has_symbolic = not apart and options.marks.policy is None
        self._logs_checkpoints = not options.marks.honours_checkpoints
        self.num_captures, self._has_traced = 0, False

    def step(self, size: int) -> CapturedStep:
        """The step at a size.

        Raises:
            InvalidSampleError, UnsupportedModelError: as for `capture_step`.
        """
        with gc_paused():
            if self._has_symbolic and size >= MIN_SYMBOLIC_SIZE <= self._axis.size:
                try:
                    return self._instance(size)
                except SizesNotCoveredError as reason:
                    logger.info("captured for %d alone, since %s", size, reason)
            return self._captured(size)

    def _instance(self, size: int) -> CapturedStep:
        call = self._axis.call_at(size)
        capture = self._capture_at(call)
        if self._has_traced:  # what kernels lay out, they do at every size
            capture = replace(capture, traced=())
        self._has_traced = True
        # Hooks and modes as of now: what the capture changed in the model is put back.
        state = self._state()
        step = step_of(
            capture,
            self._model,
            call,
            state,
            replace(self._options, hooked=hooked_of(state, self._options)),
            allocation_bytes=self._machine.allocation_bytes,
        )
        return replace(step, absence=self._sample.absence)

    def _capture_at(self, call: CallSignature) -> Capture:
        """The rewritten capture at the sizes of a call.

        Rewritten once, at generic sizes, where those can be found; else at each size.
        """
        if self._symbolic is None:
            self._symbolic = self._symbolic_capture()
            if self._options.is_bitwise:
                capture = self._symbolic.instance(call)
                self._shared = shared_names(capture, owner_names(self._model))
            try:
                self._generic = self._symbolic.generic(self._rewritten)
            except SizesNotCoveredError as reason:
                logger.info("the graph is rewritten at each size, since %s", reason)
        if self._generic is not None:
            return self._generic.instance(call)
        return run_passes(REWRITES, self._symbolic.instance(call), self._options.for_passes({}))

    def _rewritten(self, capture: Capture) -> Capture:
        options = replace(self._options, hooked=hooked_of(self._state(), self._options))
        passes = options.for_passes(owner_names(self._model))
        return run_passes((*REWRITES, *JOINT_PASSES), capture, passes)

    def _state(self) -> ModelSignature:
        """The model's state, with all parameters that have whole gradients as hooked."""
        state = ModelSignature.of(self._model)
        return replace(state, hooked=state.hooked | self._shared)

    def _symbolic_capture(self) -> SymbolicCapture:
        self.num_captures += 1
        try:
            with source_lines():
                symbolic = SymbolicCapture(
                    self._model,
                    self._axis.call,
                    self._axis.groups,
                    device=self._sample.device,
                    **self._options.traced,
                )
            self._log_checkpoints(symbolic.capture.num_checkpoints)
            return symbolic
        except (InvalidSampleError, UnsupportedModelError, SizesNotCoveredError) as error:
            self._has_symbolic = False
            raise SizesNotCoveredError(f"there is no symbolic capture ({error})") from error

    def _captured(self, size: int) -> CapturedStep:
        self.num_captures += 1
        sample = self._axis.sample_at(self._sample_input, size)
        step = capture_step(self._model, sample, self._options, machine=self._machine)
        self._log_checkpoints(step.capture.num_checkpoints)
        return step

    def _log_checkpoints(self, number: int) -> None:
        """One line for all captures."""
        if self._logs_checkpoints:
            log_lifted(self._model, number)
        self._logs_checkpoints = False
