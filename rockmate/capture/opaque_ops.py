"""Opaque calls as custom ops: a trace records each as one node, with a backward of its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from rockmate._util import attributes_set
from rockmate.capture import input_functions, window_attention
from rockmate.capture.opaque_call import OpaqueBackward, OpaqueCall, OpaqueForward
from rockmate.capture.structure import flatten
from rockmate.errors import UnsupportedModelError

_traced_calls: dict[
    str, OpaqueCall
] = {}  # of the capture that is going on, which a lock makes the only one


# --- tracing --------------------------------------------------------------------------------------


@torch.library.custom_op("rockmate::untraced", mutates_args=())
def _forward(tensors: list[Tensor], name: str) -> list[Tensor]:
    raise NotImplementedError


@torch.library.custom_op("rockmate::untraced_backward", mutates_args=())
def _backward(
    gradients: Sequence[Tensor | None], handle: Tensor, values: Sequence[Tensor], name: str
) -> list[Tensor]:
    raise NotImplementedError


@_forward.register_fake
def _(tensors: list[Tensor], name: str) -> list[Tensor]:
    call = _traced_calls[name]
    outputs = [layout.empty() for layout in call.outputs]
    return [*outputs, torch.empty(call.saved_bytes, dtype=torch.uint8, device=outputs[0].device)]


@_backward.register_fake
def _(
    gradients: Sequence[Tensor | None], handle: Tensor, values: Sequence[Tensor], name: str
) -> list[Tensor]:
    call = _traced_calls[name]
    return [layout.empty() for layout in call.gradients if layout is not None]


def _keep_handle(ctx: Any, inputs: tuple[list[Tensor], str], output: list[Tensor]) -> None:
    ctx.name = inputs[1]
    ctx.set_materialize_grads(
        False
    )  # zeros would give what leads to an unused output alone a gradient
    call = _traced_calls[ctx.name]
    ctx.save_for_backward(output[-1], *(output[index] for index in call.saved_outputs))


def _differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    call = _traced_calls[ctx.name]
    found = iter(
        torch.ops.rockmate.untraced_backward(
            gradients[:-1], ctx.saved_tensors[0], ctx.saved_tensors[1:], ctx.name
        )
    )
    return [next(found) if needs else None for needs in call.differentiable], None


_forward.register_autograd(_differentiate, setup_context=_keep_handle)


@contextlib.contextmanager
def traced_as_ops(calls: Mapping[str, OpaqueCall], model: nn.Module) -> Iterator[None]:
    """Makes each of the submodules one op of the trace, as functions of inputs and windows are.

    Only one trace may go on at a time.
    """
    by_module: dict[nn.Module, list[OpaqueCall]] = {}
    for call in calls.values():
        by_module.setdefault(call.module, []).append(call)
    _traced_calls.update(calls)
    # The tracer runs the model more than once.
    forwards = [
        (module, "forward", partial(_call_op, module, itertools.cycle(own)))
        for module, own in by_module.items()
    ]
    try:
        with (
            attributes_set(*forwards),
            input_functions.input_functions_as_ops(model),
            window_attention.windows_as_ops(model),
        ):
            yield
    finally:
        _traced_calls.clear()


def _call_op(module: nn.Module, order: Iterator[OpaqueCall], *args: Any, **kwargs: Any) -> Any:
    call = next(order)
    tensors, structure = flatten(
        (args, kwargs), what=f"the arguments of {call.name}", takes_objects=True
    )
    parameters = dict(module.named_parameters())
    given = [*tensors, *(parameters[name] for name in call.parameter_names)]
    if (
        structure != call.arguments
        or tuple(tensor.requires_grad for tensor in given) != call.differentiable
    ):
        msg = (
            f"the untraced submodule {call.name} is called in another way when the model is traced "
            "than on the sample."
        )
        raise UnsupportedModelError(msg)
    return call.result.rebuild(torch.ops.rockmate.untraced(given, call.name)[:-1])


def install(graph: fx.Graph, calls: Mapping[str, OpaqueCall]) -> None:
    """Puts what runs the submodules in the place of the ops that stood for them in the trace."""
    for node in graph.nodes:
        if node.target is torch.ops.rockmate.untraced.default:
            node.target, node.args = OpaqueForward(calls[node.args[1]]), node.args[:1]
        elif node.target is torch.ops.rockmate.untraced_backward.default:
            node.target, node.args = OpaqueBackward(calls[node.args[3]]), node.args[:3]
    input_functions.install(graph)
    window_attention.install(graph)
