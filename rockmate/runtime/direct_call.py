"""An ATen op called by PyTorch's own Python function for it, where that makes the very same call.

An emitted graph names its ops as `torch.ops.aten.mm.default`, which looks up the schema and boxes its arguments with each call. The
function that PyTorch generates for Python (`torch.mm`) enters the dispatcher with the same op in half the time, which is what a step of
small ops is made of. Whether it is the same op with the same arguments is not believed but seen: both are called with the dispatcher
listening, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

_FUNCTIONS_OF_NN: Any = torch._C._nn  # pyright: ignore[reportAttributeAccessIssue]
_HALF_NUMBER = torch.zeros((), dtype=torch.float16)


def call_directly(graph: fx.Graph) -> None:
    """Gives the ops of a graph their direct functions, in place; `meta["val"]` of the nodes they read are fake tensors of their kind."""
    for node in graph.nodes:
        is_known = all("val" in read.meta for read in node.all_input_nodes)
        if (
            node.op == "call_function"
            and isinstance(node.target, torch._ops.OpOverload)
            and is_known
        ):
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda argument: argument.meta["val"]
            )
            node.target = direct_function(node.target, args, kwargs) or node.target


def direct_function(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """PyTorch's Python function that calls `op` with these arguments when it is given them; None if there is none.

    Args:
        op: an op of ATen; others have no such function.
        args: its positional arguments; tensors may be fake.
        kwargs: its keyword arguments.
    """
    if op.namespace != "aten":
        return None
    kinds = (tuple(map(_kind, args)), tuple((name, _kind(value)) for name, value in kwargs.items()))
    known = _known(op)
    if kinds not in known:
        known[kinds] = next(_same_calls(op, args, kwargs), None)
    return known[kinds]


@lru_cache(maxsize=1024)
def _known(op: torch._ops.OpOverload) -> dict[Any, Callable[..., Any] | None]:
    """What has been found for an op, by the kinds of arguments on which the choice among overloads depends."""
    return {}


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.ndim == 0
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_kind, value))
    return type(value)


def _same_calls(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Callable[..., Any]]:
    name = op._schema.name.removeprefix("aten::")
    wanted = _heard(op, args, kwargs)
    for holder in (torch, _FUNCTIONS_OF_NN, torch.Tensor):
        function: Any = getattr(holder, name, None)
        is_generated = type(function) in (
            type(torch.mm),
            type(torch.Tensor.mm),
        )  # else it is Python, and does more
        if is_generated and wanted is not None and _is_same(wanted, _heard(function, args, kwargs)):
            yield function


class _Heard(Exception):
    """The first op that reached the dispatcher, carried out before anything is run."""


class _Listening(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise _Heard(func, tuple(args), dict(kwargs or {}))


def _heard(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """The op that a call reaches first, with its arguments; None if the function does not take them."""
    try:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), _Listening():
            function(*args, **kwargs)
    except _Heard as heard:
        return heard.args
    except (TypeError, RuntimeError, ValueError, IndexError):
        return None
    return None


def _is_same(mine: Any, theirs: Any) -> bool:
    """Whether two calls, or two arguments of them, are the same: tensors are one object, or numbers that stand for one."""
    if mine is theirs:
        return True
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, torch.Tensor):
        return _number(mine) is not None and _number(mine) == _number(theirs)
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(_is_same, mine, theirs))
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(
            _is_same(value, theirs[name]) for name, value in mine.items()
        )
    return bool(mine == theirs)


def _number(tensor: torch.Tensor) -> tuple[torch.dtype, Any] | None:
    """Type and value of a Python number that was made a tensor for the call, which promotes no other; None for another tensor."""
    if type(tensor) is not torch.Tensor or tensor.ndim or tensor.device.type != "cpu":
        return None
    is_wrapped = torch.result_type(_HALF_NUMBER, tensor) != torch.promote_types(
        _HALF_NUMBER.dtype, tensor.dtype
    )
    return (tensor.dtype, tensor.item()) if is_wrapped else None
