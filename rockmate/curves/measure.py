"""Training steps of a planned module beside the same steps of eager.

Activation peak, time, gradients.

A step is a forward and a backward from a fixed random state. The peak is the largest excess, within
one step, over what was allocated when the forward was called, `.grad` in place; the outputs live
until the backward has ended. Weights move between steps, so that a plan that kept an older weight
would show. What is measured leaves no trace: weights, buffers, gradients and generators are put
back.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rockmate._torch.allocator import timeline
from rockmate._util import gc_paused
from rockmate.capture.signature import SampleCall
from rockmate.capture.structure import flatten, loss_of
from rockmate.entry.module import RockmateModule
from rockmate.errors import UnsupportedModelError
from rockmate.state.random_state import random_state_kept

_LEARNING_RATE = 1e-3
_NUM_RECORDED_STEPS = 2
# A gradient below this share of the largest one is held against that share: it may be zero but for
# rounding.
_SMALL = 1e-3
_TOLERANCE = 1e-5  # relative, of what a sum in another order does in single precision
_TOLERANCE_ULPS = 4  # and in shorter formats


# --- equality -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How two sets of named tensors differ.

    Attributes:
        equal: bitwise, and the same names on both sides.
        largest_relative: over the tensors, the largest of max|a - b| / max|b|; infinite where one
            side lacks a tensor or holds a value that is not finite where the other's is.
        where: the name of the tensor with that difference, empty when equal.
    """

    equal: bool
    largest_relative: float
    where: str


def tensor_difference(
    ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], *, small: float = 0.0
) -> TensorDifference:
    """How `ours` differs from `reference`, by name and relative to the latter.

    A tensor whose largest value is below a `small` share of the largest of all is held against that
    share.
    """
    largest = max(map(_largest, reference.values()), default=0.0) if small else 0.0
    worst, where = 0.0, ""
    for name in ours.keys() | reference.keys():
        relative = _relative_difference(ours.get(name), reference.get(name), small * largest)
        if relative is not None and (not where or relative > worst):
            worst, where = relative, name
    return TensorDifference(equal=not where, largest_relative=worst, where=where)


def _relative_difference(
    ours: Tensor | None, reference: Tensor | None, least_scale: float
) -> float | None:
    """None when bitwise equal."""
    if ours is None or reference is None or ours.shape != reference.shape:
        return float("inf")
    if torch.equal(ours, reference):
        return None
    gap = _largest(ours.double() - reference.double())
    scale = max(_largest(reference), least_scale)
    return float("inf") if gap != gap or scale == 0.0 else gap / scale  # gap != gap: a NaN


def _largest(tensor: Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


# --- one step -------------------------------------------------------------------------------------


def run_step(
    call: Callable[..., Any], sample_input: Any, *, seed: int, num_in_flight: int = 1
) -> None:
    """Forward and backward from a fixed random state.

    Of the loss where the output has one, else of all that requires a gradient. With several in
    flight, so many forwards run first, and then their backwards in the same order.
    """
    sample = SampleCall.of(sample_input)
    torch.manual_seed(seed)
    waiting = deque(call(*sample.args, **sample.kwargs) for _ in range(num_in_flight))
    while waiting:
        outputs = waiting.popleft()
        ends = differentiated(outputs, has_labels=sample.kwargs.get("labels") is not None)
        torch.autograd.backward(
            ends, [torch.randn_like(end) if end.ndim else torch.ones_like(end) for end in ends]
        )


def differentiated(outputs: Any, *, has_labels: bool) -> list[Tensor]:
    """The output tensors at which a step's backward starts: the loss, or all with a gradient.

    Raises:
        UnsupportedModelError: No output requires a gradient.
    """
    # Only an output without a loss is taken apart: eager may return a cache that no pytree knows.
    loss = loss_of(outputs, has_labels=has_labels)
    if loss is not None:
        return [loss]
    flat, _ = flatten(outputs, what="the model's output")
    found = [tensor for tensor in flat if tensor.requires_grad]
    if not found:
        raise UnsupportedModelError(
            "no output of the model requires a gradient, so there is no step to measure. "
            "Return the loss, or the tensors it is computed from."
        )
    return found


def activation_peak(step: Callable[[], object], device: torch.device) -> int:
    """Largest excess in bytes, over one call of `step`, over what was allocated before it.

    Run the step once beforehand.
    """
    gc.collect(1)
    if device.type != "cuda":
        return max(timeline(step).peak_bytes for _ in range(_NUM_RECORDED_STEPS))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes


# --- planned steps beside eager's -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What training steps of a plan took; None where nothing was measured.

    What is told beside eager is None, too, where no step of eager was taken, or it did not fit the
    device.

    Attributes:
        measured_peak_bytes: by the allocator, over one step.
        measured_ms: one forward and backward, the median over steps.
        measured_ratio: median over the steps of its time over eager's right before it: drift of the
            machine cancels.
        measured_ratio_spread: largest less smallest of those.
        gradient_difference: largest |ours - eager's| / largest |eager's|, over parameters and
            steps; 0 where all are equal bit for bit.
        differing_gradient: the parameter where that is.
        gradient_tolerance: how much of it the order of a sum explains, in the coarsest format of
            the model's parameters.
        eager_peak_bytes: eager's measured peak.
        eager_ms: eager's time beside this plan's, the median over steps.
        num_steps: that were timed and compared.
    """

    measured_peak_bytes: int | None = None
    measured_ms: float | None = None
    measured_ratio: float | None = None
    measured_ratio_spread: float | None = None
    gradient_difference: float | None = None
    differing_gradient: str = ""
    gradient_tolerance: float = 0.0
    eager_peak_bytes: int | None = None
    eager_ms: float | None = None
    num_steps: int = 0

    @property
    def is_measured(self) -> bool:
        """Whether a step was measured."""
        return self.measured_peak_bytes is not None


class SideBySide:
    """Measures planned modules of one model beside the model itself.

    Attributes:
        eager_peak_bytes: eager's activation peak; None if it ran out of memory, or is not asked.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        *,
        num_steps: int,
        num_in_flight: int = 1,
        with_eager: bool = True,
    ) -> None:
        """Measures eager's peak.

        Args:
            model: in training mode.
            sample_input: as for `Planner`.
            num_steps: that are timed and compared for each planned module.
            num_in_flight: forwards before the first backward. A step is then so many of both, and
                its time is that of one.
            with_eager: False takes steps of planned modules alone.
        """
        self._model = model
        self._sample = sample_input
        self._num_steps = num_steps
        self._num_in_flight = num_in_flight
        self._device = next(iter(model.parameters())).device
        self.eager_peak_bytes: int | None = None
        if with_eager:
            with state_kept(model), suppress(torch.OutOfMemoryError):
                self.eager_peak_bytes = self._peak(model)

    def measure(self, module: RockmateModule) -> Measurement:
        """Steps of `module`, each right after the same step of eager."""
        with state_kept(self._model), gc_paused():
            peak_bytes = self._peak(module)
            eager_ms, planned_ms, differences = self._train(module)
        alone = Measurement(
            measured_peak_bytes=peak_bytes,
            measured_ms=statistics.median(planned_ms),
            num_steps=self._num_steps,
        )
        if self.eager_peak_bytes is None:
            return alone
        ratios = [ours / theirs for ours, theirs in zip(planned_ms, eager_ms, strict=True)]
        worst = max(differences, key=lambda found: (not found.equal, found.largest_relative))
        return replace(
            alone,
            eager_peak_bytes=self.eager_peak_bytes,
            eager_ms=statistics.median(eager_ms),
            measured_ratio=statistics.median(ratios),
            measured_ratio_spread=max(ratios) - min(ratios),
            gradient_difference=worst.largest_relative,
            differing_gradient=worst.where,
            gradient_tolerance=_tolerance(self._model),
        )

    def _peak(self, call: Callable[..., Any]) -> int:
        self._run(call, seed=0)  # makes `.grad` and library buffers
        self._model.zero_grad(set_to_none=False)
        return activation_peak(lambda: self._run(call, seed=0), self._device)

    def _run(self, call: Callable[..., Any], *, seed: int) -> None:
        run_step(call, self._sample, seed=seed, num_in_flight=self._num_in_flight)

    def _train(
        self, module: RockmateModule
    ) -> tuple[list[float], list[float], list[TensorDifference]]:
        """Times in ms of eager's and of the planned steps, and differences of their gradients."""
        eager_ms, planned_ms, differences = [], [], []
        for step in range(self._num_steps + 1):
            reference: dict[str, Tensor] = {}
            if self.eager_peak_bytes is not None:
                with _kept_buffers(self._model):
                    eager_ms.append(self._timed_step(self._model, seed=step))
                    reference = _gradients(self._model, copied=True)
            planned_ms.append(self._timed_step(module, seed=step))
            if reference:
                ours = _gradients(self._model, copied=False)
                differences.append(tensor_difference(ours, reference, small=_SMALL))
            _descend(self._model)
        return eager_ms[1:], planned_ms[1:], differences  # the first step warms up

    def _timed_step(self, call: Callable[..., Any], *, seed: int) -> float:
        self._model.zero_grad(set_to_none=False)
        gc.collect(1)  # of the last step; the older objects of planner and model need no walk
        _wait_for(self._device)
        begin = time.perf_counter()
        self._run(call, seed=seed)
        _wait_for(self._device)
        return (time.perf_counter() - begin) * 1e3 / self._num_in_flight


def _tolerance(model: nn.Module) -> float:
    ulp = max(
        torch.finfo(parameter.dtype).eps
        for parameter in model.parameters()
        if parameter.dtype.is_floating_point
    )
    return _TOLERANCE if ulp <= torch.finfo(torch.float32).eps else _TOLERANCE_ULPS * ulp


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gradients(model: nn.Module, *, copied: bool) -> dict[str, Tensor]:
    """The gradients by name, in host memory where they are copied or the device is another."""
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {name: gradient.to("cpu", copy=copied) for name, gradient in found.items()}


def _descend(model: nn.Module) -> None:
    """A small step whatever the scale of the gradients.

    A model that returns no loss may have any.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(
                    parameter.grad, alpha=-_LEARNING_RATE / (1.0 + _largest(parameter.grad))
                )


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Puts weights, buffers, gradients and the state of the generators back.

    The copies are in host memory.
    """
    tensors = [*model.parameters(), *model.buffers()]
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        with random_state_kept({tensor.device for tensor in tensors}):
            yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Puts the buffers back, so that the same step can be taken again."""
    copies = [buffer.detach().clone() for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, copy in zip(model.buffers(), copies, strict=True):
            buffer.copy_(copy)
