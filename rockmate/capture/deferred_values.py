"""Numbers that a forward reads of tensors and only hands on, as to a log.

While the forward is traced, a `Deferred` stands for such a number. All that needs the number itself
(arithmetic, a branch, a text) asks the trace, which knows what follows from the call alone. If
nothing asks for it, it is put where the forward puts it, after each planned forward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

_OF_TWO = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne",
)  # fmt: skip
_OF_NUMBER = (
    "neg", "pos", "abs", "bool", "float", "int", "index", "str", "repr", "format", "hash", "round",
    "complex", "trunc", "floor", "ceil", "len", "iter", "getitem", "contains", "reduce_ex",
)  # fmt: skip


class Deferred:
    """Stands for the number, or the list of numbers, that `read` gives of a tensor.

    Attributes:
        read: the method of the tensor.
        tensor: of the trace.
        number_of: gives the number; raises if it is not known.
        is_delivered: whether it is among what each step leaves behind.
    """

    __slots__ = ("__weakref__", "is_delivered", "number_of", "read", "tensor")

    def __init__(
        self, read: Callable[..., Any], tensor: torch.Tensor, number_of: Callable[..., Any]
    ) -> None:
        """Takes the attributes."""
        self.read, self.tensor, self.number_of = read, tensor, number_of
        self.is_delivered = False


def _set_methods() -> None:
    def number(deferred: Deferred) -> Any:
        return deferred.number_of(deferred.read, deferred.tensor)

    def set_method(name: str, method: Callable[..., Any]) -> None:
        setattr(Deferred, f"__{name}__", method)

    for name in _OF_TWO:
        function = getattr(operator, name)
        set_method(name, lambda one, two, function=function: function(number(one), two))
        set_method(f"r{name}", lambda one, two, function=function: function(two, number(one)))
    for name in _OF_NUMBER:
        name = f"__{name}__"
        set_method(name[2:-2], lambda one, *args, name=name: getattr(number(one), name)(*args))


_set_methods()
