"""State of Python objects that a second run of a forward needs as it was, and leaves as it is.

A forward may read and change members, attributes and modes of its modules, and containers and
objects that are reached from these or from its arguments, generators of random numbers among them.
When it runs a second time, in the backward, it reads what it read the first time, and its changes
are thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from rockmate._torch.members import RECURRENT_WEIGHTS, member_tables_of
from rockmate.state.objects import Handler, Objects, objects_of_python

# Tables of members and hooks, and the forward that stands in for a frame's own.
_SKIPPED = (vars(nn.Module()).keys() | RECURRENT_WEIGHTS | {"forward"}) - {"training"}
_MOST_OBJECTS = 256
"""How many are followed from one call: a module may know the whole program."""


class _Attributes(NamedTuple):
    """The attributes of a module, as a root.

    Attributes:
        table: of them, members and hooks included, which do not count.
    """

    table: dict[str, Any]


def _put(found: _Attributes, content: dict[str, Any]) -> None:
    for name in found.table.keys() - content.keys() - _SKIPPED:
        del found.table[name]
    found.table.update(content)


_OF_MODULE = Handler(
    lambda found: {name: each for name, each in found.table.items() if name not in _SKIPPED}, _put
)


def _follows(kind: type) -> Handler | None:
    return _OF_MODULE if kind is _Attributes else objects_of_python(kind)


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
        tables = [
            table
            for module in (modules if has_members else ())
            for table in member_tables_of(vars(module))[:2]
            if table
        ]
        self._roots = [*roots, *[_Attributes(vars(each)) for each in modules], *tables]
        self._most = _MOST_OBJECTS + len(modules) + len(tables)
        self._objects = Objects(self._roots, follows=_follows, most=self._most)
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
        _train(self._are_trained)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Has all stand as it did, for what runs within."""
        reached = [value for value, *_ in self._objects.found.values()]
        now = Objects([*self._roots, *reached], follows=_follows, most=self._most + len(reached))
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
