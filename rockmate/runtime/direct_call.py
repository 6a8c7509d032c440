"""Replaces ATen ops in emitted code by PyTorch's generated Python functions for them.

An emitted graph names its ops as `torch.ops.aten.mm.default`. Such a call looks up the schema and
boxes its arguments. The generated function, here `torch.mm`, enters the dispatcher with the same op
in half the time; decision 17 has the measurements.

A function replaces an op only if the dispatcher receives the same op with the same arguments from
both. Both calls are intercepted at the dispatcher when the code is written, and nothing is run. So
no table of names has to follow PyTorch's versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from rockmate._torch.dispatch import OpOverload, dispatched_call, generated_functions, is_op
from rockmate._torch.graphs import boxed_module
from rockmate._torch.pytree import tree_flatten
from rockmate.capture.size_template import Size
from rockmate.runtime.program import Argument, EmittedFunction

_FLOAT16 = torch.zeros((), dtype=torch.float16)
# By the op and the kinds of its arguments, by which alone PyTorch chooses an overload.
_found: dict[tuple[Any, ...], Callable[..., Any] | None] = {}


def compiled(graph: fx.Graph, arguments: Iterable[Argument]) -> EmittedFunction:
    """The function of an emitted graph."""
    call_directly(graph)
    module, sizes = boxed_module(graph), dict[str, Size]()

    def note(value: Any) -> Any:
        if isinstance(value, Size):
            sizes[value.name] = value
        return value

    for node in graph.nodes:
        map_aggregate((node.args, node.kwargs), note)
    return EmittedFunction(module.forward, tuple(arguments), module.code, sizes)


def call_directly(graph: fx.Graph) -> None:
    """Replaces the ops of a graph by their generated functions, in place.

    `meta["val"]` of each operand is a fake tensor. An op with an operand without it is left alone.
    """
    for node in graph.nodes:
        is_known = all("val" in operand.meta for operand in node.all_input_nodes)
        if node.op == "call_function" and is_op(node.target) and is_known:
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda argument: argument.meta["val"]
            )
            node.target = direct_function(node.target, args, kwargs) or node.target


def direct_function(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """The generated function that calls `op` with these very arguments; None if there is none.

    Args:
        op: an op of ATen; other namespaces have no such functions.
        args: its positional arguments; tensors may be fake.
        kwargs: its keyword arguments.
    """
    if op.namespace != "aten":
        return None
    named = tuple((name, _kind(value)) for name, value in kwargs.items())
    kinds = op, tuple(map(_kind, args)), named
    if kinds not in _found:
        _found[kinds] = _find_function(op, args, kwargs)
    return _found[kinds]


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.ndim == 0
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_kind, value))
    return type(value)


def _find_function(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any] | None:
    expected = dispatched_call(op, args, kwargs)
    if expected is None:
        return None
    for function in generated_functions(op):
        if _are_equal(dispatched_call(function, args, kwargs), expected):
            return function
    return None


def _are_equal(left: Any, right: Any) -> bool:
    """Whether two calls are equal, tensors by identity or by the number they stand for."""
    (leaves, spec), (others, other_spec) = tree_flatten(left), tree_flatten(right)
    return spec == other_spec and all(map(_is_same, leaves, others))


def _is_same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _wrapped_number(left) is not None and _wrapped_number(left) == _wrapped_number(right)
    return type(left) is type(right) and bool(left == right)


def _wrapped_number(tensor: torch.Tensor) -> tuple[torch.dtype, Any] | None:
    """Dtype and value of a tensor that PyTorch made of a Python number; None for other tensors.

    Such a tensor does not take part in type promotion, by which it is recognized.
    """
    if type(tensor) is not torch.Tensor or tensor.ndim or tensor.device.type != "cpu":
        return None
    promoted = torch.promote_types(_FLOAT16.dtype, tensor.dtype)
    is_wrapped = torch.result_type(_FLOAT16, tensor) != promoted
    return (tensor.dtype, tensor.item()) if is_wrapped else None
