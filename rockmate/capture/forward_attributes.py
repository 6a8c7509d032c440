"""Attributes of the model that a plan depends on, and those that its forward leaves behind."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rockmate._torch.storage import version_of, versions_of
from rockmate.capture.attribute_access import Place
from rockmate.capture.attribute_values import is_container, is_mutable, snapshot, text_of
from rockmate.capture.structure import Structure, flatten
from rockmate.capture.write_log import Write
from rockmate.state.objects import ABSENT, objects_of_python

# An attribute and the snapshots of the values that a plan accepts.
_Expected = tuple[Place, tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardAttributes:
    """What the forward of one capture has to do with attributes, and with gradients.

    Attributes:
        read: attributes that the graph depends on, each with snapshots of values that give it.
        assigned: attributes that the forward assigns, whatever stood there before.
        tables: attributes that its first call gives tensors which are the same in all calls.
        writes: what it does to containers that it only writes to.
        values: rebuilds the values that it assigns, the tables, and the arguments of writes, from
            the step's output tensors.
        fixed: attributes that it gives an object without tensors, and that object.
        constants: tensors that the graph reads, neither parameters nor buffers, and their versions.
        takes_gradient: whether it takes a gradient itself.
    """

    read: tuple[_Expected, ...] = ()
    assigned: tuple[Place, ...] = ()
    tables: tuple[Place, ...] = ()
    writes: tuple[Write, ...] = ()
    values: Structure
    fixed: tuple[tuple[Place, Any], ...] = ()
    constants: tuple[tuple[torch.Tensor, int], ...] = ()
    takes_gradient: bool = False

    def difference(self) -> str:
        """Which attribute has none of its accepted values now, in words; empty if all have."""
        for tensor, version in self.constants:
            if version_of(tensor) != version:
                return f"a tensor of shape {tuple(tensor.shape)} that it reads has been changed"
        for place, accepted in self.read:
            value = place.value()
            if snapshot(value) not in accepted:
                text = " ".join(repr(value).split())
                return f"{place} was {text_of(accepted[0])} and is {text:.100}"
        return ""

    def also_reading(self, places: Sequence[Place]) -> ForwardAttributes:
        """The same, of a graph that depends on the present values of further attributes."""
        written = {write.place for write in self.writes}
        read = ((each, (snapshot(each.value()),)) for each in places if each not in written)
        return replace(self, read=(*self.read, *read))

    @property
    def leaves_any(self) -> bool:
        """Whether the forward leaves anything behind."""
        return bool(self.assigned or self.tables or self.fixed or self.writes)

    def release(self) -> None:
        """Drops values of the last call, so that they take no memory beside those of this one."""
        for place in self.assigned:
            if not place.is_buffer:  # which the step may read
                place.put(None)

    def deliver(self, outputs: list[torch.Tensor]) -> None:
        """Leaves behind what the forward leaves behind.

        Args:
            outputs: the step's output tensors.
        """
        values = self.values.rebuild(outputs)
        for place, value in zip(self.assigned, values, strict=False):
            place.put(value)
        tables = zip(self.tables, values[len(self.assigned) :], strict=False)
        for place, value in (*tables, *self.fixed):
            present = place.value()
            if isinstance(present, dict) and isinstance(value, dict):
                present.update(value)
            elif is_container(present) and type(present) is type(value):
                handler: Any = objects_of_python(type(present))
                handler.put(present, handler.take(value))
            else:
                place.put(value)
        if self.writes:
            for write, args in zip(self.writes, values[-len(self.writes) :], strict=True):
                write.repeat(args)

    def of_copy(self, memo: dict[int, Any]) -> ForwardAttributes:
        """The same attributes of a copy of the model, which `copy.deepcopy` has made."""
        read = [place.of_copy(memo) for place, _ in self.read]
        return replace(
            self,
            read=tuple((place, (snapshot(place.value()),)) for place in read),
            constants=tuple(
                (own, version_of(own))
                for own in (memo.get(id(each), each) for each, _ in self.constants)
            ),
            assigned=tuple(place.of_copy(memo) for place in self.assigned),
            tables=tuple(place.of_copy(memo) for place in self.tables),
            writes=tuple(replace(write, place=write.place.of_copy(memo)) for write in self.writes),
            fixed=tuple(
                (place.of_copy(memo), memo.get(id(value), value)) for place, value in self.fixed
            ),
        )


NO_ATTRIBUTES = ForwardAttributes(values=flatten((), what="nothing")[1])
"""Those of a forward that neither reads nor assigns any."""


class AttributeWatch:
    """Notices that an attribute has changed; it runs with every call.

    Most attributes are the same objects in all calls, in the `__dict__` of their owner. Containers,
    what stands in a class, and what `__getattr__` computes, are compared one by one.
    """

    def __init__(self, attributes: ForwardAttributes) -> None:
        self._same: list[_Expected] = []
        self._compared: list[_Expected] = []
        for place, accepted in attributes.read:
            is_own = place.name in getattr(place.owner, "__dict__", ())
            is_same = is_own and not is_mutable(place.value())
            (self._same if is_same else self._compared).append((place, accepted))
        self._own = [(vars(place.owner), place.name) for place, _ in self._same]
        self._values = self._present()
        self._constants = [tensor for tensor, _ in attributes.constants]
        self._versions = versions_of(self._constants)

    def has_changed(self) -> bool:
        """Whether an attribute has none of the values that the plan accepts."""
        if self._constants and versions_of(self._constants) != self._versions:
            return True
        values, pending = self._present(), self._compared
        if not all(map(operator.is_, values, self._values)):
            if any(map(is_mutable, values)):
                return True
            pending = [*self._same, *self._compared]
        if any(snapshot(place.value()) not in accepted for place, accepted in pending):
            return True
        self._values = values  # other objects, but equal: a number that is computed in each step
        return False

    def _present(self) -> list[Any]:
        return [table.get(name, ABSENT) for table, name in self._own]
