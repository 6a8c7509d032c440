"""State of Python objects that a second run of a forward needs as it was, and leaves as it is.

A forward may read and change members, attributes and modes of its modules, and containers and
objects that are reached from these or from its arguments, generators of random numbers among them.
When it runs a second time, in the backward, it reads what it read the first time, and its changes
are thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rockmate._torch.members import RECURRENT_WEIGHTS, member_tables_of
from rockmate.state.objects import Objects, objects_of_python

# Tables of members and hooks, and the forward that stands in for a frame's own.
_SKIPPED = (vars(nn.Module()).keys() | RECURRENT_WEIGHTS | {"forward"}) - {"training"}
_MOST_OBJECTS = 256
"""How many are followed from one call: a module may know the whole program."""


class ObjectState:
    """Members and attributes of modules, and what is reached from there, at one time."""

    def __init__(
        self, modules: Sequence[nn.Module], roots: Iterable[Any] = (), *, has_members: bool = True
    ) -> None:
        """Takes the present state.

        Args:
            modules: all of whose attributes count.
            roots: other objects.
            has_members: whether parameters and submodules count, and which are trained.
        """
        self._owners, self._roots, self._has_members = modules, list(roots), has_members
        self._attributes = [_attributes_of(module) for module in modules]
        tables = [
            table
            for module in (modules if has_members else ())
            for table in member_tables_of(vars(module))[:2]
            if table
        ]
        values = (each for own in self._attributes for each in own.values())
        self._objects = Objects(
            [*self._roots, *values, *tables],
            follows=objects_of_python,
            most=_MOST_OBJECTS + len(tables),
        )
        parameters = (each for table in tables for each in table.values())
        self._are_trained = [
            (each, each.requires_grad) for each in parameters if isinstance(each, nn.Parameter)
        ]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that are parameters, attributes or elements."""
        return list(self._objects.tensors.values())

    def restore(self) -> None:
        """Puts all of it back."""
        self._objects.restore()
        for module, held in zip(self._owners, self._attributes, strict=True):
            table = vars(module)
            for name in table.keys() - held.keys() - _SKIPPED:
                del table[name]
            table.update(held)
        _train(self._are_trained)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Has all stand as it did, for what runs within."""
        reached = [value for value, *_ in self._objects.found.values()]
        roots = [*self._roots, *reached]
        now = ObjectState(self._owners, roots, has_members=self._has_members)
        are_trained = [(each, each.requires_grad) for each, _ in self._are_trained]
        self.restore()
        try:
            yield
        finally:
            now.restore()
            _train(are_trained)


def _train(parameters: Sequence[tuple[nn.Parameter, bool]]) -> None:
    for parameter, is_trained in parameters:
        if parameter.requires_grad != is_trained:
            parameter.requires_grad_(is_trained)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _SKIPPED}
