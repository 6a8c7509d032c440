"""Gradients of the plain model within a budget, and of a step, from the same gradients of outputs.

A backward of the plain model reads all that its forward saves, which is what a budget excludes. So
saved tensors are numbered, and of the last ones as many are held as there is room for. Where the
backward reads one that is not, the forward runs once more from the same state, and those up to that
one are held. All kernels are eager's, and nothing has to be known of the model.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Container
from typing import Any

import torch

from rockmate._torch.autocast import autocast_off
from rockmate._torch.engine import saving
from rockmate._torch.members import all_hooks_of
from rockmate._torch.storage import bytes_of
from rockmate.budget import size_text
from rockmate.capture.structure import loss_of
from rockmate.capture.trace_state import DifferentiatedError
from rockmate.runtime.ddp import is_distributed
from rockmate.state.call_state import CallState
from rockmate.state.digest import Fingerprint
from rockmate.state.tensors import storages_of, tensors_in
from rockmate.state.writes import OutOfBudget, Writes
from rockmate.trial.conditions import Conditions

logger = logging.getLogger(__name__)

_MOST_RUNS = 16  # of a forward, for one backward
_AMPLIFIED, _LEAST_ALIKE = 64, 0.25
"""How much more gradients round, whose functions are not smooth, and the most that passes."""
_SMALL = 1 / 8
"""Of the largest gradient. Smaller ones are held against that: sums that cancel are rounding."""


class Saving:
    """Runs a forward. Of what it saves, it holds as much at a time as there is room for."""

    def __init__(
        self,
        forward: Callable[[], Any],
        undo: Callable[[], None],
        room_bytes: int,
        storages: Container[int],
        *,
        runs_again: bool = True,
    ) -> None:
        """Tensors of these storages need no room. Where it must not run again: `OutOfBudget`."""
        self._runs_again = runs_again
        self._forward, self._undo = forward, undo
        self._room_bytes, self._storages = room_bytes, storages
        self._held: dict[int, tuple[torch.Tensor, int]] = {}
        self._num_runs, self._last, self._number = 0, sys.maxsize, -1  # of saved tensors

    def run(self) -> Any:
        """The output; `DifferentiatedError` if the forward takes a gradient itself."""
        self._held.clear()
        self._num_runs, self._next, self._held_bytes = self._num_runs + 1, 0, 0
        with saving(self._pack, self._unpack):
            output = self._forward()
        if self._number not in (-1, self._next):
            msg = "the forward does not save the same when it runs again"
            raise DifferentiatedError(msg)
        self._number = self._next
        return output

    def _pack(self, tensor: torch.Tensor) -> int:
        at, self._next = self._next, self._next + 1
        if at <= self._last:
            is_there = any(key in self._storages for key in storages_of(tensor))
            self._held[at] = tensor.detach(), 0 if is_there else bytes_of(tensor)
            self._held_bytes += self._held[at][1]
            while self._held_bytes > self._room_bytes:
                self._held_bytes -= self._held.pop(next(iter(self._held)))[1]
        return at

    def _unpack(self, at: int) -> torch.Tensor:
        if at not in self._held and self._runs_again:
            if self._number < 0:
                msg = "the forward takes a gradient itself"
                raise DifferentiatedError(msg)
            if self._num_runs < _MOST_RUNS:
                self._last = at
                self._undo()
                self.run()
        if at not in self._held:
            raise OutOfBudget
        return self._held[at][0]


class PlainGradients:
    """Those of a backward of the plain model, in a few bytes.

    Attributes:
        reason: why there are none, in words; else empty.
    """

    def __init__(
        self,
        forward: Callable[[], Any],
        undo: Callable[[], None],
        before: CallState,
        writes: Writes,
        conditions: Conditions,
        *,
        has_labels: bool,
    ) -> None:
        """Runs forward and backward of the plain model, and undoes them.

        Args:
            forward: of the plain model.
            undo: puts the state before the call back.
            before: that state.
            writes: keeps the budget; new gradients do not count, as in the step itself.
            conditions: of the trial.
            has_labels: whether labels are among the arguments.
        """
        self._before, self._has_labels, self._conditions = before, has_labels, conditions
        tensors = before.objects.tensors.values()
        self._leaves = [each for each in tensors if each.requires_grad and each.is_leaf]
        self._found: list[Fingerprint | None] = []
        most_bytes = conditions.most_bytes
        plain = Saving(forward, undo, most_bytes // 2, before.storages)
        writes.most_bytes = most_bytes + sum(map(bytes_of, self._leaves))
        try:
            self.reason = self._obstacle()
            if not self.reason:
                with writes.noted():
                    self._found = self._numbers(plain.run(), is_plain=True)
        except (OutOfBudget, torch.OutOfMemoryError):
            self.reason = f"eager's backward takes more than {size_text(most_bytes)}"
        except (DifferentiatedError, RuntimeError) as error:
            self.reason = str(error)
        finally:
            undo()
            writes.release()
            writes.most_bytes = most_bytes
        if self.reason:
            logger.info("gradients of %s are not compared: %s", conditions.what, self.reason)

    def _obstacle(self) -> str:
        if torch.is_anomaly_enabled():
            return "anomalies of the step are to be detected, not those of a trial"
        if is_distributed():
            return "a backward may reduce gradients among ranks"
        if any(each.grad_fn is not None for each in tensors_in(self._before.arguments)):
            return "an argument has a graph, whose backward is to run once"
        for each in self._leaves:
            if each.grad is not None or any(all_hooks_of(each)):
                return f"{self._before.name_of(id(each))} has a gradient or a hook before the step"
        return ""

    def difference(self, output: Any, rounding: float) -> str:
        """What differs in the gradients of a step, in words; else empty.

        Args:
            output: of the step, whose backward runs.
            rounding: of a forward, in units of the size of elements.
        """
        tolerance = min(_LEAST_ALIKE, _AMPLIFIED * rounding)
        tolerance = rounding if self._conditions.is_exact else tolerance
        ours = self._numbers(output, is_plain=False)
        least = _SMALL * max((each.largest for each in self._found if each), default=0.0)
        for leaf, one, two in zip(self._leaves, self._found, ours, strict=True):
            found = ""
            if one is None or two is None:
                either = one or two
                if either is not None and either.largest > tolerance * least:
                    found = "is missing" if two is None else "is one that eager does not have"
            elif one.sample is not None and two.sample is not None:  # neither is sparse
                found = one.difference(two, tolerance, least)
            if found:
                return f"the gradient of {self._before.name_of(id(leaf))} {found}"
        return ""

    def _numbers(self, output: Any, *, is_plain: bool) -> list[Fingerprint | None]:
        """Of the gradients from 1 for the loss; without one, from ramps for all outputs."""
        loss = loss_of(output, has_labels=self._has_labels)
        graded = [each for each in tensors_in(output) if each.requires_grad]
        graded = graded if loss is None else [loss]
        del output
        is_captured = self._conditions.is_captured
        if not graded or (not is_captured and any(each.numel() > 1 for each in graded)):
            msg = "the loss is computed outside"  # frames rely on the strides of its gradients
            raise DifferentiatedError(msg)
        ramps = [torch.linspace(1, -1, n.numel(), dtype=n.dtype, device=n.device) for n in graded]
        ramps = [each.view(of.shape) for each, of in zip(ramps, graded, strict=True)]
        with autocast_off(), torch.autograd.set_multithreading_enabled(False):
            if is_plain:
                found = torch.autograd.grad(graded, self._leaves, ramps, allow_unused=True)
            else:
                inputs = None if is_captured else self._leaves
                torch.autograd.backward(graded, ramps, inputs=inputs)
                found = [each.grad for each in self._leaves]
        return [each if each is None else Fingerprint.of(each, is_exact=False) for each in found]
