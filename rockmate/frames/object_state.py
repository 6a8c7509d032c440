"""State of Python objects that a second run of a forward needs as it was, and leaves as it is.

A forward may read and change attributes and modes of its modules, containers and objects that are
reached from these or from its arguments, and generators of random numbers among them. When it runs
again in the backward, it reads what it read the first time, and its changes are thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rockmate._torch.members import RECURRENT_WEIGHTS
from rockmate.state.objects import Objects, objects_of_python

# Tables of members and hooks, and the forward that stands in for a frame's own.
_SKIPPED = (vars(nn.Module()).keys() | RECURRENT_WEIGHTS | {"forward"}) - {"training"}
_MOST_OBJECTS = 256
"""How many are followed from one call: a module may know the whole program."""


class ObjectState:
    """Attributes of modules, and what is reached from them and from other roots, at one time."""

    def __init__(self, modules: Sequence[nn.Module], roots: Iterable[Any] = ()) -> None:
        """Takes the present state.

        Args:
            modules: all of whose attributes count.
            roots: other objects.
        """
        self._owners, self._roots = modules, list(roots)
        self._attributes = [_attributes_of(module) for module in modules]
        pending = [*self._roots, *(each for own in self._attributes for each in own.values())]
        self._objects = Objects(pending, follows=objects_of_python, most=_MOST_OBJECTS)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that are attributes or elements."""
        return list(self._objects.tensors.values())

    def restore(self) -> None:
        """Puts all of it back."""
        self._objects.restore()
        for module, held in zip(self._owners, self._attributes, strict=True):
            table = vars(module)
            for name in table.keys() - held.keys() - _SKIPPED:
                del table[name]
            table.update(held)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Has all stand as it did, for what runs within."""
        reached = [value for value, *_ in self._objects.found.values()]
        now = ObjectState(self._owners, [*self._roots, *reached])
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _SKIPPED}
