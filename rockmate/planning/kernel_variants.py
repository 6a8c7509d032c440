"""One step with fused kernels and without: for each budget, the form whose plan is faster.

Where fusing gains nothing, such as a BERT on a CPU whose ops are fused already, a plan of single
ops may be faster: it has more values to choose from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from rockmate._torch.distributed import first_offer
from rockmate.bound.protocol import Bounds, MinBound
from rockmate.capture.memory_format import output_layouts
from rockmate.costs.layout_check import captured_in_kernel_layouts
from rockmate.errors import InvalidSampleError, MissingCompilerError, UnsupportedModelError
from rockmate.graph.convolution_formats import draws_of, may_read_channels_last
from rockmate.plan.chunking_notes import ChunkingNotes
from rockmate.planning.candidate import Candidate
from rockmate.planning.chunk_variants import Variants
from rockmate.planning.numerics import check_numerics
from rockmate.planning.step_forms import StepForms
from rockmate.planning.strategies import BITWISE
from rockmate.planning.variant import Variant
from rockmate.step import CapturedStep

logger = logging.getLogger(__name__)

Kernels = Literal["eager", "fused", "auto"]


def fused_forms(
    step: CapturedStep, *, progress: bool, compile_limit_s: float
) -> list[CapturedStep]:
    """The step with fused kernels; none where there is no compiler, with a line in the log.

    A kernel that is slower than its ops may be worth its memory. So where some are, there is a form
    with them, too.
    """
    try:
        fused = step.fused(progress=progress, compile_limit_s=compile_limit_s)
    except MissingCompilerError as error:
        logger.warning("kernels are not fused: %s", error)
        return []
    left = fused.options["unfused"]
    whole = step.fused(unfused="", compile_limit_s=compile_limit_s) if left else fused
    return [fused] if whole.options["unfused"] == left else [fused, whole]


def other_forms(
    kernels: Kernels,
    step: CapturedStep,
    channels_last: Callable[..., CapturedStep] | None,
    *,
    progress: bool,
    compile_limit_s: float,
) -> Callable[[], list[CapturedStep]] | None:
    """What makes further forms of a step with fused kernels; None if there are none.

    Args:
        kernels: what was asked for.
        step: as captured.
        channels_last: captures it once more, op by op, with convolutions that read channels last
            and outputs in layouts; None where times are not measured.
        progress: as for `Planner`.
        compile_limit_s: as for `Planner`.
    """
    is_reordered = channels_last is not None and may_read_channels_last(step.capture.joint.graph)
    if kernels == "eager" or (kernels == "fused" and not is_reordered):
        return None

    def forms() -> list[CapturedStep]:
        limits: Any = {"progress": progress, "compile_limit_s": compile_limit_s}
        found = fused_forms(step, **limits) if kernels == "auto" else []
        if is_reordered and (found or kernels == "fused"):
            assert channels_last is not None
            other = _with_channels_last(step, channels_last)
            if other is not None:
                is_auto = kernels == "auto"
                found += fused_forms(other, **limits) if is_auto else [other.fused(**limits)]
        return found

    return forms


def _with_channels_last(
    step: CapturedStep, channels_last: Callable[..., CapturedStep]
) -> CapturedStep | None:
    """The other form; None if more than rounding would differ, with a line in the log."""
    try:
        layouts = output_layouts(step.capture)
        other = captured_in_kernel_layouts(partial(channels_last, output_layouts=layouts))
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
    fused = [form for form in forms if "kernels" in form.unchunked.step.options]
    formats = {_format_of(form): form for form in reversed(fused)}
    if len(formats) < 2:
        return [*forms]
    fastest = min(formats, key=lambda each: formats[each].unchunked.baseline.time_ms)
    agreed = first_offer(f"memory format of {formats[''].unchunked.text}", fastest)
    return [form for form in forms if form not in fused or _format_of(form) == agreed]


def _format_of(form: Variants) -> str:
    return form.unchunked.step.options.get("memory_format", "")


def check_kernels(kernels: str, numerics: str) -> None:
    """Raises `ValueError` for values that `Planner` does not take, alone or together."""
    check_numerics(numerics, kernels=kernels)
    if kernels not in ("eager", "fused", "auto"):
        msg = f"kernels is {kernels!r}; choose 'eager', 'fused' or 'auto'"
        raise ValueError(msg)


class KernelVariants(StepForms):
    """The variants of a step for each form of its kernels.

    Args:
        forms: the step with single ops first.
    """

    def __init__(self, forms: Sequence[Variants]) -> None:
        self._forms = forms
        self.unchunked = forms[0].unchunked

    def step_for(self, options: Mapping[str, str]) -> CapturedStep:
        """See `StepForms.step_for`."""
        return self._form_of(options).step_for(options)

    def notes(self, variant: Variant, budget_bytes: int) -> ChunkingNotes:
        """See `StepForms.notes`; bitwise plans have eager's kernels."""
        found = self._form_of(variant.step.options).notes(variant, budget_bytes)
        return replace(found, search=self.unchunked.local_search.best_within)

    def _form_of(self, options: Mapping[str, str]) -> Variants:
        def is_alike(form: Variants, *names: str) -> bool:
            own = form.unchunked.step.options
            return all(own.get(name) == options.get(name) for name in names)

        alike = [form for form in self._forms if is_alike(form, "kernels")] or self._forms
        return next((form for form in alike if is_alike(form, "unfused")), alike[0])

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
