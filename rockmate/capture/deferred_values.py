"""Numbers that a forward reads of tensors and only hands on, as to a log.

While the forward is traced, a `Deferred` stands for such a number. All that needs the number itself
(arithmetic, a branch, a text) asks the trace, which knows what follows from the call alone. If
nothing asks for it, it is put where the forward puts it, after each planned forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_OF_ALL = frozenset((
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__", "__str__",
    "__format__", "__reduce_ex__",
))  # fmt: skip


def methods_of(*kinds: type) -> set[str]:
    """Names of the methods of classes that tell something of an object's value."""
    return {*_OF_ALL, *(name for kind in kinds for name in dir(kind) if not hasattr(object, name))}


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Deferred:
    """Stands for the number, or the list of numbers, that `read` gives of a tensor.

    Attributes:
        read: the method of the tensor.
        tensor: of the trace.
        number_of: gives the number; raises if it is not known.
        is_delivered: whether it is among what each step leaves behind.
    """

    read: Callable[..., Any]
    tensor: torch.Tensor
    number_of: Callable[..., Any]
    is_delivered: bool = False
    _number: Any = None

    def number(self) -> Any:
        """The number itself, which is asked for once."""
        if self._number is None:
            self._number = self.number_of(self.read, self.tensor)
        return self._number


for _name in methods_of(bool, int, float, list):
    setattr(Deferred, _name, lambda self, *args, of=_name: getattr(self.number(), of)(*args))
