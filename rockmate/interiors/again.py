"""A planned call whose backward runs as in eager, where it is not the one that was tried.

A gradient of an output may come in other strides than in the trial, for which kernels round
otherwise, or the backward may be one that is differentiated again. Then the forward runs once more
as in eager, and autograd goes back through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from rockmate._torch.engine import keeps_graph
from rockmate.capture.structure import flatten
from rockmate.frames.call import Call
from rockmate.frames.storages import tensors_in
from rockmate.interiors.readers import contributions_noted
from rockmate.runtime.autograd import PlannedStep, Runner
from rockmate.runtime.program import Program

Gradients = Sequence[torch.Tensor | None]


class InteriorRunner(Runner):
    """Runs one schedule of a captured inside.

    Attributes:
        call: the one that runs next, with what a second run of it needs.
    """

    def __init__(
        self,
        program: Program,
        module: nn.Module,
        *,
        path: str,
        forward: Callable[..., Any],
        is_tried: Callable[[Gradients], bool],
    ) -> None:
        """Finds the places of the module's tensors.

        Args:
            program: forward and backward; gradients are returned.
            module: whose inside it is.
            path: of the module, for errors.
            forward: of the module, as in eager.
            is_tried: whether a trial had gradients of outputs like these.
        """
        way_out = f", or leave it whole: keep={[path]!r}"
        super().__init__(program, module, name=path, way_out=way_out)
        self.function = _InteriorStep
        self.call: Call | None = None
        self._forward, self.is_tried = forward, is_tried

    def eager_gradients(self, call: Call, tangents: Gradients) -> Gradients:
        """Gradients of the function's tensors, as autograd hands them over in eager.

        Args:
            call: that runs again.
            tangents: gradients of its outputs.
        """
        given: list[torch.Tensor] = []

        def noting(*args: Any, **kwargs: Any) -> Any:
            given.extend(tensors_in((args, kwargs)))
            return self._forward(*args, **kwargs)

        is_second = torch.is_grad_enabled()
        call.note_run_again(is_differentiated=is_second)
        parameters = [self.binding[name] for name in self.returned_names]
        with call.again(noting, keeps_history=is_second) as (run, _):
            outputs, _ = flatten(run(), what="the output")
            pairs = [
                (output, tangent)
                for output, tangent in zip(outputs, tangents, strict=True)
                if tangent is not None and output.requires_grad
            ]
            leaves = list(dict.fromkeys(e for e in (*given, *parameters) if e.requires_grad))
            ends = [output for output, _ in pairs]
            noted = nullcontext() if is_second else contributions_noted(ends, leaves)
            with noted as found:
                sums = torch.autograd.grad(
                    ends, leaves, [tangent for _, tangent in pairs],
                    allow_unused=True, create_graph=is_second,
                )  # fmt: skip
        handed = found if found is not None else [[] if e is None else [e] for e in sums]
        queues = dict(zip(map(id, leaves), handed, strict=True))
        further = [given[index] for index, _ in self.further_gradients]
        places = [*given, *further, *parameters]
        return [
            _next(queues[id(each)], is_last=not any(each is later for later in places[at + 1 :]))
            if id(each) in queues else None
            for at, each in enumerate(places)
        ]  # fmt: skip


def _next(queue: list[torch.Tensor], *, is_last: bool) -> torch.Tensor | None:
    """The next gradient that a tensor gets; at the last place, the sum of all that are left."""
    if not queue:
        return None
    gradient = queue.pop(0)
    while is_last and queue:
        gradient = gradient + queue.pop(0)
    return gradient


class _InteriorStep(PlannedStep):
    """One planned call as an autograd function."""

    @staticmethod
    def forward(ctx: Any, runner: InteriorRunner, *args: Any) -> tuple[torch.Tensor, ...]:
        ctx.call, runner.call = runner.call, None
        return PlannedStep.forward(ctx, runner, *args)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        runner, call = ctx.runner, ctx.call
        if not keeps_graph():
            ctx.call = None  # it holds inputs, and the script may hold this node
        is_planned = not torch.is_grad_enabled() and runner.is_tried(tangents)
        if call is None or ctx.saved is None or is_planned:
            return PlannedStep.backward(ctx, *tangents)
        runner.pending.begin(ctx)
        if not keeps_graph():
            ctx.saved = None
        return None, None, None, None, None, *runner.eager_gradients(call, tangents)
