"""The steps of a model for calls that differ in the sizes of their tensors.

One symbolic capture serves all sizes where it can.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor, nn

from rockmate._util import gc_paused
from rockmate.capture.opaque_module import opaque_modules
from rockmate.capture.provenance import source_lines
from rockmate.capture.read_values import ReadValues, SampleValues
from rockmate.capture.roles import Capture
from rockmate.capture.signature import CallSignature, SampleCall
from rockmate.capture.size_template import SizedNumbers, SizeGroups, SizesNotCoveredError
from rockmate.costs.layout_check import check_traced
from rockmate.errors import InvalidSampleError, KernelLayoutError, MarkError, UnsupportedModelError
from rockmate.fusion.report import COMPILE_LIMIT_S
from rockmate.fusion.rewrite import Fusion
from rockmate.graph.ir import Graph
from rockmate.graph.parameters import owner_names
from rockmate.graph.passes import JOINT_PASSES, REWRITES, PassOptions, run_passes
from rockmate.graph.snapshot_capture import snapshot_of
from rockmate.graph.step_options import StepOptions
from rockmate.plan.plan import Plan
from rockmate.planning.step import CapturedStep, capture_step, checked_step, step_of
from rockmate.runtime.emit import emit
from rockmate.runtime.program import PlannedCall, Program
from rockmate.runtime.sized_program import difference, specialize
from rockmate.schedule.schedule import find_in_place

if TYPE_CHECKING:
    from rockmate.capture.symbolic import GenericCapture, SymbolicCapture

_Made = TypeVar("_Made")
logger = logging.getLogger(__name__)

# Sizes beside the sample's for which kernels are compiled; each takes seconds.
MAX_FUSED_SIZES = 8
_MOST_NUMBERS = 512  # that a forward reads and that are symbols
_MANY_LENGTHS = 4  # beside the sample's, captured one by one: worth a warning
# Why a capture for all sizes is not made.
_NO_CAPTURE = (InvalidSampleError, UnsupportedModelError, SizesNotCoveredError, MarkError)
_NUM_LENGTHS, _LEAST_LENGTH = 8, 8  # how many lengths it advises at most, and the smallest


class StepFamily:
    """Captures a model for other sizes than the planned ones, while its state is the plan's.

    Numbers that the forward reads from inputs (the grid of an image, how many elements of a mask
    are true) are sizes, too: of the carriers in a `sized` call.

    The first call of other sizes is worth a symbolic capture, which takes several times as long as
    one of fixed sizes and then serves every other, unless it differs in the batch alone: that is
    the last one of an epoch, and captured as it is. The symbolic capture is held against the
    planned step at that one's own sizes and used only if the two are equal. Where it cannot be
    made, is not equal or says nothing of the sizes at hand, each set of sizes is captured by
    itself, and the log says why.

    A smaller call takes over a schedule. Its program is the planned one's with other numbers:
    emitted once from the generic capture, and held against the planned program, line by line,
    before it is used. Nothing is built or written for a size that comes after that.

    Attributes:
        founder: the planned call whose step is known.
        num_separate: captures of one call's sizes alone.
    """

    def __init__(
        self, model: nn.Module, planned: PlannedCall, *, compile_limit_s: float = COMPILE_LIMIT_S
    ) -> None:
        """Takes a model, the planned call whose step is known, and a limit as for `Planner`."""
        self._model, self.founder, self._compile_limit_s = model, planned, compile_limit_s
        # For whose sizes kernels are compiled, and which were captured alone, in their order.
        self._fused_calls, self._separate_calls = [planned.call], [planned.call]
        self._is_warned_of_kernels, self._owner_of = False, owner_names(model)
        self._symbolic: SymbolicCapture | None = None
        self._generic: GenericCapture | None = None
        self._sized_programs: dict[PlannedCall, _SizedCall] = {}
        # What there is not, of which call, and why.
        self._refusals: dict[tuple[str, PlannedCall | None], str] = {}
        self._other_batch: CallSignature | None = None
        self.num_separate = 0

    @cached_property
    def _options(self) -> StepOptions:
        """Those of the capture."""
        return replace(self.founder.plan.options, loss_chunks=None)

    @cached_property
    def _first(self) -> CallSignature:
        """The known step's call, with its carriers."""
        return self.founder.read_values.sized(self.founder.call) or self.founder.call

    @cached_property
    def _groups(self) -> SizeGroups:
        """Its sizes that are alike."""
        return SizeGroups.of(self._first)

    @cached_property
    def _fixed(self) -> set[tuple[int, int]]:
        """Places without a symbol. Where numbers are read, much hangs on dims that never change."""
        places = chain.from_iterable(SizeGroups.of(self.founder.call).places)
        return set() if self.founder.read_values.read is None else set(places)

    def serves(self, call: CallSignature, tensors: Sequence[Tensor]) -> bool:
        """Whether the symbolic capture, which may be made for this, holds for what a call reads."""
        with suppress(SizesNotCoveredError), gc_paused():
            self._sized(call, tensors)
            return True
        return False

    def resized(
        self, planned: PlannedCall, call: CallSignature, tensors: Sequence[Tensor]
    ) -> PlannedCall | None:
        """A planned call at sizes that are nowhere larger, its program with other numbers.

        None where that is not known to be right.

        Args:
            planned: a planned call of this family.
            call: signature of the smaller one.
            tensors: those of that call.
        """
        options = planned.plan.options
        if options.loss_chunks:  # whose sizes are no expressions of the call's
            return None
        if options.kernels == "fused":  # kernels are compiled for the sizes of a call
            return None
        try:
            with gc_paused():
                sized_call, read_values = self._sized(call, tensors)
                generic = self._generic_capture(sized_call)
                numbers = generic.numbers(sized_call)
                sized = self._sized_programs.get(planned)
                if sized is None:
                    sized = self._sized_programs[planned] = self._once(
                        "program", lambda: self._sized_call(planned, generic), planned
                    )
        except SizesNotCoveredError:  # `step` finds the same, and says it
            return None
        if not numbers.are_within(sized.numbers):
            return None
        return replace(
            planned,
            program=specialize(sized.program, numbers),
            call=call,
            read_values=read_values,
            plan_of=lambda: self._plan(planned, generic.instance(sized_call), call),
            larger=planned.larger or planned,
        )

    def _plan(self, planned: PlannedCall, capture: Capture, call: CallSignature) -> Plan:
        if owner_names(self._model) != self._owner_of:  # it is read after the model has changed
            return planned.plan
        step = self._step_of(capture, call, like=planned.plan.graph)
        # A graph whose sizes coincide may be wired otherwise. No value of the program is larger.
        return step.adapted(planned.plan, in_place=planned.plan.schedule.in_place) or planned.plan

    def _sized_call(self, planned: PlannedCall, generic: GenericCapture) -> _SizedCall:
        """The planned call's program with names for its sizes; equal to it at its own sizes."""
        plan = planned.plan
        graph = self._step_of(generic.capture, planned.call).graph
        if not plan.snapshot.is_wired_like(snapshot_of(graph, planned.call)):
            raise SizesNotCoveredError(
                "at the sample's sizes values are equal that are not in general"
            )
        for op, other in zip(graph.ops, plan.graph.ops, strict=True):
            op.gradient_sink_form = other.gradient_sink_form
        if not plan.schedule.in_place <= find_in_place(graph, *plan.schedule.order):
            raise SizesNotCoveredError(
                "at the sample's sizes ops run in place that cannot in general"
            )
        program = emit(graph, plan.schedule, self._owner_of, plan.flights, plan.offload)
        program = replace(program, moved=planned.program.moved)
        numbers = generic.numbers(planned.read_values.sized(planned.call) or planned.call)
        found = difference(program, numbers, planned.program)
        if found:
            raise SizesNotCoveredError(f"at the sample's sizes the program is another: {found}")
        return _SizedCall(program, numbers)

    def step(self, tensors: Sequence[Tensor], call: CallSignature) -> CapturedStep:
        """The model's step for a call of other sizes, with its loss block whole.

        Args:
            tensors: those of the call.
            call: its signature.

        Raises:
            InvalidSampleError, UnsupportedModelError: as for `capture_step`.
        """
        with gc_paused():
            try:
                sized_call, read_values = self._sized(call, tensors)
                assert self._symbolic is not None
                capture = self._symbolic.instance(sized_call)
                capture = replace(capture, read_values=read_values)
                check_traced(capture.traced, self.founder.plan.budget_bytes)
                capture = run_passes(REWRITES, capture, self._pass_options)
                return self._step_of(capture, call)
            except (SizesNotCoveredError, KernelLayoutError) as reason:
                self.num_separate += 1
                logger.warning("captured for these sizes alone, since %s: %s", reason, call)
                self._warn_of_lengths(call, str(reason))
            options, limit_s = self._options_for(call), self._compile_limit_s
            sample = SampleCall(*call.structure.rebuild([*tensors]))
            return checked_step(
                lambda: capture_step(self._model, sample, options, compile_limit_s=limit_s)
            )

    def _warn_of_lengths(self, call: CallSignature, reason: str) -> None:
        """Warns once of many lengths that were captured one by one."""
        if _differs_in_batch(self.founder.call, call):
            return
        self._separate_calls.append(call)
        if len(self._separate_calls) == 1 + _MANY_LENGTHS:
            logger.warning(
                "the model has been captured for %d lengths one by one, since %s. Each capture "
                "takes time. %s",
                _MANY_LENGTHS,
                " ".join(reason.split()),
                _advice_on_sizes(self._separate_calls),
            )

    def _sized(
        self, call: CallSignature, tensors: Sequence[Tensor]
    ) -> tuple[CallSignature, ReadValues]:
        """A call with its carriers, and what is read in it.

        The symbolic capture is there then: it is made when it is first worth it, and tells how to
        read the values of a call of any sizes.
        """
        carriers = self._first.tensors[len(call.tensors) :]
        symbolic = self._symbolic_capture(call, replace(call, tensors=(*call.tensors, *carriers)))
        read = symbolic.capture.read_values
        if read.read is None:
            return call, read
        values = read.values(self._model, tensors)
        sized_call = None if values is None else read.sized(call, values)
        if sized_call is None or len(sized_call.tensors) != len(self._first.tensors):
            raise SizesNotCoveredError("the forward branches on values of its inputs or buffers")
        self._symbolic_capture(call, sized_call)
        return sized_call, replace(read, expected=values)

    def _symbolic_capture(self, call: CallSignature, sized_call: CallSignature) -> SymbolicCapture:
        groups = self._groups.refined(sized_call)
        groups.check_symbolic(self._first, sized_call)
        fixed = {at for at in self._fixed if self._first.size_at(*at) == call.size_at(*at)}
        if groups != self._groups or fixed != self._fixed:  # symbols would stand for others
            self._groups, self._symbolic, self._generic = groups, None, None
            self._fixed = fixed
            self._sized_programs.clear()
            self._refusals.clear()
        if self._symbolic is None:
            is_other = call != self.founder.call and self._other_batch is None
            if is_other and _differs_in_batch(self.founder.call, call):
                self._other_batch = call
            if call == self._other_batch:
                raise SizesNotCoveredError(
                    "one smaller or larger batch is not worth a symbolic capture"
                )
            self._symbolic = self._once("symbolic capture", self._equal_capture)
        return self._symbolic

    def _generic_capture(self, sized_call: CallSignature) -> GenericCapture:
        assert self._symbolic is not None
        if self._generic is None:
            make = partial(self._symbolic.generic, self._rewritten, sized_call)
            self._generic = self._once("generic capture", make)
        return self._generic

    def _rewritten(self, capture: Capture) -> Capture:
        return run_passes((*REWRITES, *JOINT_PASSES), capture, self._pass_options)

    @property
    def _pass_options(self) -> PassOptions:
        return self.founder.plan.options.for_passes(self._owner_of)

    def _once(self, what: str, make: Callable[[], _Made], of: PlannedCall | None = None) -> _Made:
        """What `make` makes; where it cannot be made, that is not tried again, and said once."""
        if (what, of) not in self._refusals:
            try:
                return make()
            except _NO_CAPTURE as error:
                self._refusals[what, of] = f"there is no {what} for all sizes ({error})"
                logger.info("%s", self._refusals[what, of])
        raise SizesNotCoveredError(self._refusals[what, of])

    def _equal_capture(self) -> SymbolicCapture:
        """A symbolic capture that equals the planned step at that one's sizes."""
        begin = time.perf_counter()
        planned, options = self.founder, self._options
        read, values = planned.read_values, None
        if read.read is not None:
            number = len(self._first.tensors) - len(planned.call.tensors)
            if number > _MOST_NUMBERS:
                raise SizesNotCoveredError("the forward reads values of its inputs or buffers")
            values = SampleValues(read.sample, dict(self._model.named_buffers()), number)
        apart = list(opaque_modules(self._model, options.untraced))
        if apart:
            raise SizesNotCoveredError(
                f"the submodule {apart[0]} is not traced, so that its sizes are known from runs "
                "alone"
            )
        from rockmate.capture.symbolic import SymbolicCapture  # loads sympy

        with source_lines():
            groups = SizeGroups(
                tuple(each for each in self._groups.places if not self._fixed.issuperset(each))
            )
            symbolic = SymbolicCapture(
                self._model, self._first, groups, values=values, **options.traced
            )
        if [*map(str, symbolic.capture.read_values.expected)] != [*map(str, read.expected)]:
            raise SizesNotCoveredError("the forward reads other values where sizes are symbols")
        capture = symbolic.instance(self._first)
        capture = run_passes(REWRITES, capture, self._pass_options)
        step = self._step_of(capture, planned.call).with_chunks_of(planned.plan.options)
        found = planned.plan.snapshot.difference(snapshot_of(step.graph, planned.call))
        if found:
            raise SizesNotCoveredError(f"at the sample's sizes the graph is another: {found}")
        seconds = time.perf_counter() - begin
        logger.info(
            "captured with symbolic sizes in %.1f s: batches of other sizes need no further "
            "capture",
            seconds,
        )
        return symbolic

    def _step_of(
        self, capture: Capture, call: CallSignature, *, like: Graph | None = None
    ) -> CapturedStep:
        fusion, options = None, self._options_for(call)
        if options.kernels == "fused":
            fusion = Fusion(
                refused=options.unfused,
                is_for_other_sizes=call != self.founder.call,
                compile_limit_s=self._compile_limit_s,
            )
        return step_of(
            capture, self._model, call, self.founder.state, options, like=like, fusion=fusion
        )

    def has_kernels_alike(self, call: CallSignature, planned: CallSignature) -> bool:
        """Whether a call will run the same kind of kernels as one that was planned."""
        return self._options.kernels == "eager" or self._is_fused(call) == (
            planned in self._fused_calls
        )

    def _is_fused(self, call: CallSignature) -> bool:
        """Whether kernels are compiled for a call: only for the first few sizes."""
        return call in self._fused_calls or len(self._fused_calls) <= MAX_FUSED_SIZES

    def _options_for(self, call: CallSignature) -> StepOptions:
        """The options of the capture."""
        options = self._options
        if options.kernels == "eager":
            return options
        if self._is_fused(call):
            if call not in self._fused_calls:
                self._fused_calls.append(call)
            return options
        if not self._is_warned_of_kernels:
            self._is_warned_of_kernels = True
            logger.warning(
                "kernels have been compiled for %d sizes of calls. Calls of further sizes run "
                "PyTorch's own kernels, within the same budget. %s",
                1 + MAX_FUSED_SIZES,
                _advice_on_sizes([*self._fused_calls, call]),
            )
        return replace(options, kernels="eager", unfused=None)


@dataclass(frozen=True, slots=True)
class _SizedCall:
    """A program with names for its sizes, and their numbers in the call that was planned."""

    program: Program
    numbers: SizedNumbers


def _differs_in_batch(planned: CallSignature, call: CallSignature) -> bool:
    """Whether the calls differ in the leading dimension of their tensors alone."""
    return all(
        mine.shape[1:] == theirs.shape[1:]
        for mine, theirs in zip(planned.tensors, call.tensors, strict=True)
    )


def _advice_on_sizes(calls: Sequence[CallSignature]) -> str:
    """How fewer sizes would occur."""
    if all(_differs_in_batch(calls[0], call) for call in calls):
        return "Give batches of few sizes, as a data loader with drop_last=True does."
    places = zip(
        *([size for tensor in call.tensors for size in tensor.shape[1:]] for call in calls),
        strict=True,
    )
    largest = max(max(sizes) for sizes in places if len(set(sizes)) > 1)
    # A power of two of which at most `_NUM_LENGTHS` lengths are multiples.
    size = max(_LEAST_LENGTH, 1 << (-(-largest // _NUM_LENGTHS) - 1).bit_length())
    return (
        f"Pad batches to multiples of {size}, so that few sizes occur: pad_to_multiple_of={size} "
        "in a Hugging Face data collator."
    )
