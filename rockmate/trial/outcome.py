"""What one run of a call has given and left behind, without a hold on its tensors."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rockmate.capture.structure import flatten, loss_of
from rockmate.errors import UnsupportedModelError
from rockmate.state.call_state import CallState, steps_of
from rockmate.state.contents import ATOMS, Both, TensorState, is_same_content
from rockmate.state.digest import Fingerprint
from rockmate.state.members import objects_and_members
from rockmate.state.objects import ABSENT, Objects
from rockmate.state.random_state import RandomState
from rockmate.state.tensors import storages_of
from rockmate.state.writes import Writes
from rockmate.trial.conditions import Conditions

# What of the path to a member or into a hook no script has written.
_TABLE = re.compile(r"\b_(parameters|buffers|modules)\.")
_HOOK = re.compile(r"\.?_(forward|backward)\w*_hooks\[\d+\](\[\d+\])*\.?")

OF_STEP_ALONE = "is changed in place, which eager leaves as it is"
"""What cannot be undone, as the trial has no copy."""


class Mark(NamedTuple):
    """Stands for a tensor.

    Attributes:
        numbers: of the tensor.
        requires_grad: whether it does.
        parameter: address of a parameter that was there before the call; -1 for another one, None
            for a tensor that is no parameter.
    """

    numbers: Fingerprint
    requires_grad: bool
    parameter: int | None


class Reference(NamedTuple):
    """Stands for any other object.

    Attributes:
        key: its address.
        kind: its type.
        name: of a function or class.
    """

    key: int
    kind: type
    name: str


@dataclass(slots=True)
class Outcome:
    """What one run of a call has given and left behind.

    Attributes:
        output: what stands for the model's output, as for an object that was made.
        contents: address of an object that has changed, or was made -> its content.
        shared: for each tensor of the output, whether its memory is that of an earlier one, or of a
            tensor that was there before.
        written: storage -> its numbers, of those that eager's run has changed in place.
        random: the random state.
        versions: of tensors that were there before.
    """

    output: Any
    random: RandomState
    contents: dict[int, Any] = field(default_factory=dict)
    shared: tuple[bool, ...] = ()
    written: dict[int, Fingerprint] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Reader:
    """Takes outcomes of runs that begin in one state.

    Attributes:
        before: the state.
        writes: those of eager's run.
        conditions: of the trial.
    """

    before: CallState
    writes: Writes
    conditions: Conditions
    _taken: dict[int, Fingerprint] = field(default_factory=dict)  # by tensor, of one outcome

    @property
    def has_labels(self) -> bool:
        """Whether labels are among the arguments."""
        return self.before.arguments[1].get("labels") is not None

    def outcome(self, output: Any) -> Outcome:
        """That of a run which has just ended, with an output."""
        if self.conditions.only_loss:
            output = loss_of(output, has_labels=self.has_labels)
        outcome = Outcome(None, self.before.random_now())
        self._taken.clear()
        made = Objects([output], follows=objects_and_members)
        outcome.output = self._stand_in(output, made)
        reached = self.before.reached()
        for key, (value, _, content) in (made.found | reached.found).items():
            known = self.before.objects.content_of(value)
            if known is None or not is_same_content(known, content):
                outcome.contents[key] = self._frozen(content, reached)
        outcome.shared = self._shared(output)
        outcome.written = {
            key: self._numbers(tensor)
            for key, tensor in self.writes.changed.items()
            if key in self.before.storages  # others may be the run's own
        }
        outcome.versions = self.before.versions()
        return outcome

    def frozen_before(self, key: int) -> Any:
        """The content that an object had before the call, as in an outcome."""
        found = self.before.objects.found.get(key)
        return None if found is None else self._frozen(found[2], self.before.objects)

    def _numbers(self, tensor: torch.Tensor) -> Fingerprint:
        if id(tensor) not in self._taken:
            self._taken[id(tensor)] = Fingerprint.of(tensor, is_exact=self.conditions.is_exact)
        return self._taken[id(tensor)]

    def _shared(self, output: Any) -> tuple[bool, ...]:
        seen, found = set(self.before.storages), []
        try:
            tensors, _ = flatten(output, what="the output")
        except UnsupportedModelError:  # no output of a plan
            return ()
        for tensor in tensors:
            keys = storages_of(tensor)
            found.append(not seen.isdisjoint(keys))
            seen.update(keys)
        return tuple(found)

    def _frozen(self, content: Any, objects: Objects) -> Any:
        if isinstance(content, TensorState):
            memory = self._numbers(content.memory)
            hooks = tuple([len(each or ()) for each in content.hooks])
            own = {name: self._stand_in(each, objects) for name, each in content.attributes.items()}
            grad = None if content.gradient is None else id(content.gradient)
            return {"its numbers": memory, "requires_grad": content.requires_grad,
                    "grad": grad, "its hooks": hooks, **own}  # fmt: skip
        if isinstance(content, Both):
            return Both(*(self._frozen(each, objects) for each in content))
        if isinstance(content, dict):
            return {key: self._stand_in(each, objects) for key, each in content.items()}
        if isinstance(content, list):
            return [self._stand_in(each, objects) for each in content]
        return content

    def _stand_in(self, value: Any, objects: Objects) -> Any:
        if type(value) in ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            parameter = None
            if isinstance(value, nn.Parameter):
                parameter = id(value) if id(value) in self.before.objects.tensors else -1
            return Mark(self._numbers(value), value.requires_grad, parameter)
        if isinstance(value, tuple):
            return tuple([self._stand_in(each, objects) for each in value])
        name = ""
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            name = f"{value.__module__}.{value.__qualname__}"
        return Reference(id(value), type(value), name)


class Difference(NamedTuple):
    """Where two outcomes differ.

    Attributes:
        path: what differs.
        text: how.
        one: stands for what the first run has there.
        two: the same of the second run.
        is_key: whether the item is there in one of both alone.
    """

    path: str
    text: str = ""
    one: Any = None
    two: Any = None
    is_key: bool = False

    def __str__(self) -> str:
        return f"{self.path} {self.text}".strip()

    @property
    def place(self) -> str:
        """What is the same in other runs, whose values or keys are others."""
        return (self.is_key and self.path.rpartition("[")[0]) or self.path

    @property
    def is_of_training(self) -> bool:
        """Whether it is one of tensors that the script gets, or that have a gradient."""
        marks = [each for each in (self.one, self.two) if isinstance(each, Mark)]
        return any(each.requires_grad or self.path.startswith("output") for each in marks)

    def by(self) -> Any:
        """How much larger a number is in the second run; None for what is no number."""
        pair = [each.numbers if isinstance(each, Mark) else each for each in (self.one, self.two)]
        pair = [each.sample if isinstance(each, Fingerprint) else each for each in pair]
        first, second = (np.asarray(each) for each in pair)
        is_number = first.dtype.kind in "iuf" and second.dtype.kind in "iuf"
        return (second.astype(float) - first).tolist() if is_number else None


@dataclass(slots=True)
class Comparison:
    """Two outcomes of one call side by side, with the state that both began in."""

    _reader: Reader
    _eager: Outcome
    _ours: Outcome
    _tolerance: float
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def differences(self) -> Iterator[Difference]:
        """What differs."""
        eager, ours = self._eager, self._ours
        yield from self._items(eager.output, ours.output, "output")
        yield from self._writes()
        for key in dict.fromkeys([*eager.contents, *ours.contents]):
            if key in self._reader.before.objects.found:
                one, two = (self._content(each, key) for each in (eager, ours))
                for found in self._contents(one, two, "", is_named=True):
                    yield found._replace(path=self._named(key, found.path))
        if any(two and not one for one, two in zip(eager.shared, ours.shared, strict=False)):
            yield Difference("an output", "shares its memory with another tensor, not so in eager")
        for whose in eager.random.differences(ours.random):
            yield Difference("the random state", f"of {whose} is another one after the call")

    def _writes(self) -> Iterator[Difference]:
        eager, ours = self._eager, self._ours
        for key, numbers in eager.written.items():
            for found in self._items(numbers, ours.written[key], ""):
                path = self._reader.before.name_of(id(self._reader.before.storages[key]))
                yield found._replace(path=path)
        tensors = self._reader.before.objects.tensors
        for key, old, new in zip(tensors, eager.versions, ours.versions, strict=True):
            is_known = not eager.written.keys().isdisjoint(self._reader.before.storages_of(key))
            if old != new and not is_known:
                yield Difference(self._reader.before.name_of(key), OF_STEP_ALONE)

    def _named(self, key: int, path: str) -> str:
        path = f"{self._reader.before.name_of(key)}{path}".removeprefix("the model.")
        return " ".join(_HOOK.sub(r" \1 hook ", _TABLE.sub("", path)).split())

    def _content(self, outcome: Outcome, key: int) -> Any:
        found = outcome.contents.get(key)
        return self._reader.frozen_before(key) if found is None else found

    def _contents(self, one: Any, two: Any, path: str, *, is_named: bool) -> Iterator[Difference]:
        if isinstance(one, Both) and isinstance(two, Both):
            yield from self._contents(one.items, two.items, path, is_named=False)
            one, two, is_named = one.attributes, two.attributes, True
        if type(one) is not type(two) or not isinstance(one, dict | list):
            if not is_same_content(one, two):
                yield Difference(path, "is in another state than in eager")
            return
        eager, ours = dict(steps_of(one)), dict(steps_of(two))
        for key in dict.fromkeys([*eager, *ours]):
            step = f"{path}.{key}" if is_named and isinstance(key, str) else f"{path}[{key!r}]"
            step = path if key == "its numbers" else step
            if key in eager and key in ours:
                yield from self._items(eager[key], ours[key], step)
            else:
                pair = (each.get(key, ABSENT) for each in (eager, ours))
                yield _of_values(step, *pair, is_key=not is_named)

    def _items(self, one: Any, two: Any, path: str) -> Iterator[Difference]:
        if type(one) is not type(two):
            yield _of_values(path, one, two)
        elif isinstance(one, Mark | Fingerprint):
            numbers = [each.numbers if isinstance(each, Mark) else each for each in (one, two)]
            found = numbers[0].difference(numbers[1], self._tolerance)
            if found:
                yield Difference(path, found, one, two)
            elif isinstance(one, Mark) and one.parameter != two.parameter:
                yield Difference(path, "is another parameter than in eager")
        elif isinstance(one, Reference):
            yield from self._references(one, two, path)
        elif isinstance(one, tuple):
            yield from self._contents(list(one), list(two), path, is_named=False)
        elif repr(one) != repr(two) and not (
            type(one) is float  # that was read of a tensor
            and math.isclose(one, two, rel_tol=self._tolerance, abs_tol=self._tolerance)
        ):
            yield _of_values(path, one, two)

    def _references(self, one: Reference, two: Reference, path: str) -> Iterator[Difference]:
        if one.kind is not two.kind or one.name != two.name:
            yield _of_values(path, one, two)
            return
        if (one.key, two.key) in self._seen:
            return
        self._seen.add((one.key, two.key))
        known = self._reader.before.objects.found
        if one.key == two.key and one.key in known:
            return  # its own changes are compared by themselves
        if issubclass(one.kind, nn.Module) and (one.key in known) != (two.key in known):
            yield Difference(path, "is another module than in eager")
            return
        contents = self._content(self._eager, one.key), self._content(self._ours, two.key)
        if None not in contents:
            yield from self._contents(*contents, path, is_named=not issubclass(one.kind, dict))


def _of_values(path: str, one: Any, two: Any, *, is_key: bool = False) -> Difference:
    return Difference(path, f"is {_text(two)}, and {_text(one)} in eager", one, two, is_key)


def _text(value: Any) -> str:
    if isinstance(value, Mark | Fingerprint):
        numbers = value.numbers if isinstance(value, Mark) else value
        return f"a tensor {str(numbers.dtype).removeprefix('torch.')}{list(numbers.shape)}"
    if isinstance(value, Reference):
        return value.name or f"a {value.kind.__qualname__}"
    return f"{value!r:.100}"
