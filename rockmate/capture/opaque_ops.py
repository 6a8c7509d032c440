"""Calls that run as they are, as custom ops: a trace records each as one node, with a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueOp:
    """A call as one op of a trace.

    Attributes:
        forward: runs it in a plan, `(tensors) -> results`.
        results: makes results whose values are not set, of the tensors.
        backward: `(gradients of the results, saved) -> gradients` of the tensors that get one.
        saved: what the backward takes, of the tensors and the results.
        gradients: makes those that the backward returns, of what is saved; values are not set.
        differentiable: of the tensors, which get a gradient; empty if none does.
    """

    forward: Any
    results: Callable[[Sequence[Tensor]], list[Tensor]]
    backward: Any = None
    saved: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]] = lambda *_: ()
    gradients: Callable[[Sequence[Tensor]], list[Tensor]] = lambda _: []
    differentiable: Sequence[bool] = ()

    def traced(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results in the trace that goes on, which gets one node for them."""
        name = str(len(_traced))
        _traced[name] = self
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(self.differentiable)):
            return torch.ops.rockmate.opaque([*tensors], name)


_traced: dict[str, OpaqueOp] = {}  # of the capture that goes on, which a lock makes the only one


def install(graph: fx.Graph) -> None:
    """Puts what runs the calls in the place of the ops that stand for them in a trace."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.rockmate.opaque.default):
        tensors, name = node.args
        node.target, node.args = _traced[name].forward, (tensors,)
    backward = torch.ops.rockmate.opaque_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        gradients, saved, name = node.args
        node.target, node.args = _traced[name].backward, (gradients, saved)


def forget_traced() -> None:
    """Drops the calls of a trace that has ended."""
    _traced.clear()


@torch.library.custom_op("rockmate::opaque", mutates_args=())
def _forward(tensors: list[Tensor], name: str) -> list[Tensor]:
    raise NotImplementedError


@torch.library.custom_op("rockmate::opaque_backward", mutates_args=())
def _backward(
    gradients: Sequence[Tensor | None], saved: Sequence[Tensor], name: str
) -> list[Tensor]:
    raise NotImplementedError


@_forward.register_fake
def _(tensors: list[Tensor], name: str) -> list[Tensor]:
    return _traced[name].results(tensors)


@_backward.register_fake
def _(gradients: Sequence[Tensor | None], saved: Sequence[Tensor], name: str) -> list[Tensor]:
    return _traced[name].gradients(saved)


def _save(ctx: Any, inputs: tuple[list[Tensor], str], output: list[Tensor]) -> None:
    tensors, ctx.name = inputs
    # Zeros would give what leads to an unused output alone a gradient.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*_traced[ctx.name].saved(tensors, output))


def _differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    found = iter(torch.ops.rockmate.opaque_backward(gradients, ctx.saved_tensors, ctx.name))
    return [next(found) if needs else None for needs in _traced[ctx.name].differentiable], None


_forward.register_autograd(_differentiate, setup_context=_save)
