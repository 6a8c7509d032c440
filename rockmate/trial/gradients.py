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
from rockmate._torch.engine import backward_id, saving
from rockmate._torch.members import all_hooks_of, has_node_hooks
from rockmate._torch.storage import bytes_of
from rockmate.budget import size_text
from rockmate.capture.structure import loss_of
from rockmate.capture.trace_state import DifferentiatedError
from rockmate.offload.trained_home import ground_of
from rockmate.runtime.ddp import is_distributed
from rockmate.state.digest import Fingerprint
from rockmate.state.tensors import storages_of, tensors_in
from rockmate.state.writes import OutOfBudget
from rockmate.trial.outcome import Outcome, Reader

logger = logging.getLogger(__name__)

_MOST_RUNS = 16  # of a forward, for one backward
_AMPLIFIED, _LEAST_ALIKE = 64, 0.25
"""How much more gradients round, whose functions are not smooth, and the most that passes."""
_SMALL = 1 / 8
"""Of the largest gradient. Smaller ones are held against that: sums that cancel are rounding."""


class Saving:
    """Runs a forward. Of what it saves, it holds the latest, until it is to evict some.

    Attributes:
        num_runs: how many times it has run.
    """

    def __init__(
        self, forward: Callable[[], Any], undo: Callable[[], None], storages: Container[int]
    ) -> None:
        """Tensors of these storages are there anyway."""
        self._forward, self._undo, self._storages = forward, undo, storages
        self._held: dict[int, torch.Tensor] = {}
        self._used: set[int] = set()  # of those, by backwards
        self.num_runs, self._last, self._number = 0, sys.maxsize, -1  # of saved tensors

    def run(self) -> Any:
        """The output of one more run."""
        self._held.clear()
        self._used.clear()
        self.num_runs, self._next = self.num_runs + 1, 0
        with saving(self._pack, self._unpack):
            output = self._forward()
        if self._number not in (-1, self._next):
            raise DifferentiatedError("the forward does not save the same when it runs again")
        self._number = self._next
        return output

    def evict(self) -> bool:
        """Drops what backwards have read, or save, else the oldest part; whether there is any."""
        used = self._used & self._held.keys()
        dropped = used or list(self._held)[: 1 + len(self._held) // 8]
        for each in dropped:
            del self._held[each]
        return bool(dropped)

    def _pack(self, tensor: torch.Tensor) -> int | torch.Tensor:
        if any(key in self._storages for key in storages_of(tensor)):
            return tensor.detach()
        at, self._next = self._next, self._next + 1
        if at <= self._last:
            self._held[at] = tensor.detach()
        if backward_id() >= 0:
            self._used.add(at)
        return at

    def _unpack(self, at: int | torch.Tensor) -> torch.Tensor:
        """A saved tensor. The forward runs again for one that was evicted, if it has ended."""
        if isinstance(at, torch.Tensor):
            return at
        if at not in self._held and self._number >= 0 and self.num_runs < _MOST_RUNS:
            self._last = at
            self._undo()
            self.run()
        if at not in self._held:
            raise OutOfBudget
        self._used.add(at)
        return self._held[at]


class PlainGradients:
    """Those of a backward of the plain model, in a few bytes.

    Attributes:
        reason: why there are none, in words; else empty.
        left: what the backward has left behind; None where its forward had to run several times.
    """

    def __init__(
        self, forward: Callable[[], Any], undo: Callable[[], None], reader: Reader
    ) -> None:
        """Runs forward and backward of the plain model, and undoes them.

        Args:
            forward: of the plain model.
            undo: puts the state before the call back.
            reader: of outcomes. Its writes keep the budget. As in the step itself, new gradients do
                not count, but those that a step has at home, and this backward in memory.
        """
        before, writes, conditions = reader.before, reader.writes, reader.conditions
        self._before, self._has_labels, self._conditions = before, reader.has_labels, conditions
        self.left: Outcome | None = None
        tensors = before.objects.tensors.values()
        self._leaves = [each for each in tensors if each.requires_grad and each.is_leaf]
        self._found: list[Fingerprint | None] = []
        plain = Saving(forward, undo, before.storages)
        try:
            self.reason = self._obstacle()
            if not self.reason:
                resident = (each for each in self._leaves if ground_of(each) is None)
                with writes.noted(plain.evict, more_bytes=sum(map(bytes_of, resident))):
                    self._found = self._numbers(plain.run(), is_plain=True)
                self.left = reader.outcome(None) if plain.num_runs == 1 else None
        except (OutOfBudget, torch.OutOfMemoryError):
            most_bytes = conditions.most_bytes
            self.reason = f"eager's backward takes more than {size_text(most_bytes)}"
        except (DifferentiatedError, RuntimeError) as error:
            self.reason = str(error)
        finally:
            undo()
            writes.release()
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
            has_hooks = any(all_hooks_of(each)) or each.is_inference() or has_node_hooks(each)
            if each.grad is not None or has_hooks:  # an inference tensor has no node for them
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
        numbers = [each if each is None else Fingerprint.of(each, is_exact=False) for each in found]
        for leaf in self._leaves:
            leaf.grad = None
        return numbers
