"""Attributes of the model that a plan depends on, and those that its forward leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from rockmate.capture.attribute_access import Place
from rockmate.capture.attribute_values import (
    is_container,
    is_mutable,
    refill,
    snapshot,
    text_of,
)
from rockmate.capture.structure import Structure, flatten


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardAttributes:
    """What the forward of one capture has to do with attributes.

    Attributes:
        read: attributes that the graph depends on.
        accepted: for each of them, snapshots of the values that give this graph.
        assigned: attributes that the forward assigns, whatever stood there before.
        values: rebuilds the values that it assigns from the step's output tensors.
        fixed: attributes that it gives an object without tensors, and that object.
        counted: attributes to which each forward adds a number that no tensor depends on, and the
            numbers.
    """

    read: tuple[Place, ...] = ()
    accepted: tuple[tuple[Any, ...], ...] = ()
    assigned: tuple[Place, ...] = ()
    values: Structure
    fixed: tuple[tuple[Place, Any], ...] = ()
    counted: tuple[tuple[Place, int | float], ...] = ()

    def difference(self) -> str:
        """Which attribute has none of its accepted values now, in words; empty if all have."""
        for place, accepted in zip(self.read, self.accepted, strict=True):
            value = place.value()
            if snapshot(value) not in accepted:
                return f"{place} was {text_of(accepted[0])} and is {value!r:.100}"
        return ""

    def release(self) -> None:
        """Drops tensors of the last call, so that they take no memory beside those of this one."""
        for place in self.assigned:
            if isinstance(place.value(), torch.Tensor):
                place.put(None)

    def deliver(self, outputs: list[torch.Tensor]) -> None:
        """Leaves behind what the forward leaves behind.

        Args:
            outputs: the step's output tensors.
        """
        for place, value in zip(self.assigned, self.values.rebuild(outputs), strict=True):
            place.put(value)
        for place, value in self.fixed:
            present = place.value()
            if is_container(present) and type(present) is type(value):
                refill(present, value)
            else:
                place.put(value)
        for place, number in self.counted:
            place.put(place.value() + number)

    def of_copy(self, memo: dict[int, Any]) -> ForwardAttributes:
        """The same attributes of a copy of the model, which `copy.deepcopy` has made."""
        read = tuple(place.of_copy(memo) for place in self.read)
        return replace(
            self,
            read=read,
            accepted=tuple((snapshot(place.value()),) for place in read),
            assigned=tuple(place.of_copy(memo) for place in self.assigned),
            fixed=tuple(
                (place.of_copy(memo), memo.get(id(value), value)) for place, value in self.fixed
            ),
            counted=tuple((place.of_copy(memo), number) for place, number in self.counted),
        )


NO_ATTRIBUTES = ForwardAttributes(values=flatten((), what="nothing")[1])
"""Those of a forward that neither reads nor assigns any."""


class AttributeWatch:
    """Notices that an attribute has changed; it runs with every call.

    Most attributes stand in the `__dict__` of their owner and are the same objects in all calls,
    which C functions find out. Others, and containers, are compared one by one.
    """

    def __init__(self, attributes: ForwardAttributes) -> None:
        """Takes the present values."""
        pairs = list(zip(attributes.read, attributes.accepted, strict=True))
        held: dict[int, tuple[dict[str, Any], list[str]]] = {}
        self._held_pairs: list[tuple[Place, tuple[Any, ...]]] = []
        self._others: list[tuple[Place, tuple[Any, ...]]] = []
        for place, accepted in sorted(pairs, key=lambda pair: id(pair[0].owner)):
            table = getattr(place.owner, "__dict__", {})
            if place.name not in table or is_mutable(table[place.name]):
                self._others.append((place, accepted))
                continue
            held.setdefault(id(place.owner), (table, []))[1].append(place.name)
            self._held_pairs.append((place, accepted))
        self._tables = [table for table, _ in held.values()]
        # A name twice: `itemgetter` gives no tuple for one.
        self._getters = [itemgetter(names[0], *names) for _, names in held.values()]
        self._values = self._present()

    def has_changed(self) -> bool:
        """Whether an attribute has none of the values that the plan accepts."""
        try:
            values = self._present()
        except KeyError:
            return True
        if list(map(id, values)) != list(map(id, self._values)):
            for place, accepted in self._held_pairs:
                value = place.value()
                if is_mutable(value) or snapshot(value) not in accepted:
                    return True
            self._values = values
        return any(snapshot(place.value()) not in accepted for place, accepted in self._others)

    def _present(self) -> list[Any]:
        return list(
            chain.from_iterable(
                [get(table) for get, table in zip(self._getters, self._tables, strict=True)]
            )
        )
