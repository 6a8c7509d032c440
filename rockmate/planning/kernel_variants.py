"""One step with fused kernels and without: for each budget, the form whose plan is faster.

Where fusing gains nothing, such as a BERT on a CPU whose ops are fused already, a plan of single
ops may be faster: it has more values to choose from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from rockmate._torch.distributed import first_offer
from rockmate.bound.protocol import Bounds, MinBound
from rockmate.capture.memory_format import output_layouts
from rockmate.costs.layout_check import captured_in_kernel_layouts
from rockmate.errors import InvalidSampleError, MissingCompilerError, UnsupportedModelError
from rockmate.graph.convolution_formats import draws_of, may_read_channels_last
from rockmate.graph.step_options import StepOptions
from rockmate.plan.chunking_notes import ChunkingNotes
from rockmate.planning.candidate import Candidate
from rockmate.planning.chunk_variants import Variants
from rockmate.planning.options import PlanOptions
from rockmate.planning.step_forms import StepForms
from rockmate.planning.strategies import BITWISE
from rockmate.planning.variant import Variant
from rockmate.step import CapturedStep

logger = logging.getLogger(__name__)


def fused_forms(step: CapturedStep, options: PlanOptions) -> list[CapturedStep]:
    """The step with fused kernels; none where there is no compiler, with a line in the log.

    A kernel that is slower than its ops may be worth its memory. So where some are, there is a form
    with them, too.
    """
    try:
        fused = step.fused(progress=options.progress, compile_limit_s=options.compile_limit_s)
    except MissingCompilerError as error:
        logger.warning("kernels are not fused: %s", error)
        return []
    left = fused.options.unfused
    whole = step.fused(unfused=(), compile_limit_s=options.compile_limit_s) if left else fused
    return [fused] if whole.options.unfused == left else [fused, whole]


def other_forms(
    options: PlanOptions, step: CapturedStep, capture: Callable[[StepOptions], CapturedStep] | None
) -> Callable[[], list[CapturedStep]] | None:
    """What makes further forms of a step with fused kernels; None if there are none.

    Args:
        options: what was asked for.
        step: as captured.
        capture: captures it once more, with other options; None where times are not measured.
    """
    is_auto = options.kernels == "auto"
    if capture is not None and not may_read_channels_last(step.capture.joint.graph):
        capture = None
    if options.kernels == "eager" or not (is_auto or capture):
        return None

    def forms() -> list[CapturedStep]:
        found = fused_forms(step, options) if is_auto else []
        if capture is not None and (found or not is_auto):
            other = _with_channels_last(step, options, capture)
            if other is not None and is_auto:
                found += fused_forms(other, options)
            elif other is not None:
                limit_s = options.compile_limit_s
                found.append(other.fused(progress=options.progress, compile_limit_s=limit_s))
        return found

    return forms


def _with_channels_last(
    step: CapturedStep, options: PlanOptions, capture: Callable[[StepOptions], CapturedStep]
) -> CapturedStep | None:
    """The form, op by op, with convolutions that read channels last and outputs in layouts.

    None if more than rounding would differ, with a line in the log.
    """
    try:
        changed = replace(
            options.step,
            kernels="eager",
            memory_format="channels_last",
            output_layouts=output_layouts(step.capture),
        )
        other = captured_in_kernel_layouts(lambda: capture(changed))
    except (InvalidSampleError, UnsupportedModelError) as error:
        logger.info("convolutions do not read channels last: %s", error)
        return None
    if draws_of(other.capture.joint.graph) != draws_of(step.capture.joint.graph):
        logger.info("convolutions do not read channels last: other numbers would be drawn")
        return None
    return other


def in_one_format(forms: Sequence[Variants]) -> list[Variants]:
    """Of the forms with fused kernels, those in the memory format that is faster unplanned.

    So the same kernels run at every budget. Ranks of a process group take the format of the first.
    """
    fused = [form for form in forms if form.unchunked.step.options.kernels == "fused"]
    formats = {_format_of(form): form for form in reversed(fused)}
    if len(formats) < 2:
        return [*forms]
    fastest = min(formats, key=lambda each: formats[each].unchunked.baseline.time_ms)
    agreed = first_offer(f"memory format of {formats['as_given'].unchunked.text}", fastest)
    return [form for form in forms if form not in fused or _format_of(form) == agreed]


def _format_of(form: Variants) -> str:
    return form.unchunked.step.options.memory_format


class KernelVariants(StepForms):
    """The variants of a step for each form of its kernels.

    Args:
        forms: the step with single ops first.
    """

    def __init__(self, forms: Sequence[Variants]) -> None:
        self._forms = forms
        self.unchunked = forms[0].unchunked

    def step_for(self, options: StepOptions) -> CapturedStep:
        """See `StepForms.step_for`."""
        return self._form_of(options).step_for(options)

    def notes(self, variant: Variant, budget_bytes: int) -> ChunkingNotes:
        """See `StepForms.notes`; bitwise plans have eager's kernels."""
        found = self._form_of(variant.step.options).notes(variant, budget_bytes)
        return replace(found, search=self.unchunked.local_search.best_within)

    def _form_of(self, options: StepOptions) -> Variants:
        known = [(form, form.unchunked.step.options) for form in self._forms]
        alike = [form for form, own in known if own.kernels == options.kernels] or self._forms
        same = (form for form, own in known if form in alike and own.unfused == options.unfused)
        return next(same, alike[0])

    def _of(self, strategy: str) -> Sequence[Variants]:
        """The forms that a strategy chooses from: "bitwise" has eager's kernels."""
        return self._forms[:1] if strategy == BITWISE else self._forms

    def best_within(self, budget_bytes: int, strategy: str) -> tuple[Variant, Candidate] | None:
        """See `StepForms.best_within`."""
        found = [form.best_within(budget_bytes, strategy) for form in self._of(strategy)]
        return min(filter(None, found), key=lambda pair: pair[1].time_ms, default=None)

    def best_within_each(
        self, budgets: Sequence[int], *, progress: bool = False
    ) -> dict[int, tuple[Variant, Candidate]]:
        """See `StepForms.best_within_each`."""
        best: dict[int, tuple[Variant, Candidate]] = {}
        for form in self._forms:
            for budget, found in form.best_within_each(budgets, progress=progress).items():
                if budget not in best or found[1].time_ms < best[budget][1].time_ms:
                    best[budget] = found
        return dict(sorted(best.items()))

    def frontier(self, strategy: str) -> list[tuple[int, Candidate]]:
        """See `StepForms.frontier`."""
        points = [point for form in self._of(strategy) for point in form.frontier(strategy)]
        fastest: list[tuple[int, Candidate]] = []
        for budget_bytes, candidate in sorted(points, key=lambda each: (each[0], each[1].time_ms)):
            if not fastest or candidate.time_ms < fastest[-1][1].time_ms:
                fastest.append((budget_bytes, candidate))
        return fastest

    def bounds_within(self, budget_bytes: int) -> Bounds:
        """See `StepForms.bounds_within`."""
        return MinBound(lambda: [form.bounds_within(budget_bytes) for form in self._forms])

    def minimum(self, strategy: str) -> Candidate:
        """See `StepForms.minimum`."""
        found = [form.minimum(strategy) for form in self._of(strategy)]
        return min(found, key=lambda candidate: candidate.peak_bytes)

    def min_peak(self, strategy: str) -> Candidate:
        """See `StepForms.min_peak`."""
        found = [form.min_peak(strategy) for form in self._of(strategy)]
        return min(found, key=lambda candidate: candidate.peak_bytes)
