"""What one run of a call has given and left behind, without a hold on its tensors."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from rockmate.capture.structure import flatten, loss_of
from rockmate.errors import UnsupportedModelError
from rockmate.state.call_state import CallState, steps_of
from rockmate.state.contents import ATOMS, Both, TensorState, is_same_content
from rockmate.state.digest import Fingerprint
from rockmate.state.members import objects_and_members
from rockmate.state.objects import Objects
from rockmate.state.random_state import RandomState
from rockmate.state.tensors import storages_of
from rockmate.state.writes import Writes

# What of the path to a member or into a hook no script has written.
_TABLE = re.compile(r"\b_(parameters|buffers|modules)\.")
_HOOK = re.compile(r"\.?_(forward|backward)\w*_hooks\[\d+\](\[\d+\])*\.?")


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
        is_exact: whether bits are to be compared.
        has_labels: whether labels are among the arguments.
        only_loss: whether the loss is all that is returned.
    """

    before: CallState
    writes: Writes
    is_exact: bool
    has_labels: bool
    only_loss: bool
    _taken: dict[int, Fingerprint] = field(default_factory=dict)  # by tensor, of one outcome

    def outcome(self, output: Any) -> Outcome:
        """That of a run which has just ended, with an output."""
        if self.only_loss:
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
            self._taken[id(tensor)] = Fingerprint.of(tensor, is_exact=self.is_exact)
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
        if isinstance(content, Mapping):
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


@dataclass(slots=True)
class Comparison:
    """Two outcomes of one call side by side, with the state that both began in."""

    _before: CallState
    _reader: Reader
    _eager: Outcome
    _ours: Outcome
    _tolerance: float
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def difference(self) -> str:
        """What differs, in words; empty if nothing does."""
        return next(self._differences(), "")

    def of_numbers(self) -> str:
        """What differs in outputs, or in what ops have changed in place; empty if nothing does."""
        return next(self._numbers(), "")

    def _numbers(self) -> Iterator[str]:
        yield from self._items(self._eager.output, self._ours.output, "output")
        yield from self._writes()

    def _differences(self) -> Iterator[str]:
        eager, ours = self._eager, self._ours
        yield from self._numbers()
        for key in dict.fromkeys([*eager.contents, *ours.contents]):
            if key in self._before.objects.found:
                one, two = (self._content(each, key) for each in (eager, ours))
                found = next(self._contents(one, two, "", is_named=True), "")
                if found:
                    yield self._named(key, found)
        if any(two and not one for one, two in zip(eager.shared, ours.shared, strict=False)):
            yield "an output shares its memory with another tensor, which it does not in eager"
        for whose in eager.random.differences(ours.random):
            yield f"the random state of {whose} is another one after the call"

    def _writes(self) -> Iterator[str]:
        eager, ours = self._eager, self._ours
        for key, numbers in eager.written.items():
            found = numbers.difference(ours.written[key], self._tolerance)
            if found:
                yield f"{self._before.name_of(id(self._before.storages[key]))} {found}"
        for key in self.changed_alone():
            yield f"{self._before.name_of(key)} is changed in place, which eager leaves as it is"

    def changed_alone(self) -> Iterator[int]:
        """Addresses of tensors that the second run changes and the first does not know."""
        eager, tensors = self._eager, self._before.objects.tensors
        for key, old, new in zip(tensors, eager.versions, self._ours.versions, strict=True):
            is_known = not eager.written.keys().isdisjoint(self._before.storages_of(key))
            if old != new and not is_known:
                yield key

    def _named(self, key: int, found: str) -> str:
        path = self._before.name_of(key)
        text = f"{path}{found}" if found[:1] in (".", "[") else f"{path} {found.strip()}"
        text = _HOOK.sub(r" \1 hook ", _TABLE.sub("", text.removeprefix("the model.")))
        return " ".join(text.split())

    def _content(self, outcome: Outcome, key: int) -> Any:
        found = outcome.contents.get(key)
        return self._reader.frozen_before(key) if found is None else found

    def _contents(self, one: Any, two: Any, path: str, *, is_named: bool) -> Iterator[str]:
        if isinstance(one, Both) and isinstance(two, Both):
            yield from self._contents(one.items, two.items, path, is_named=False)
            one, two, is_named = one.attributes, two.attributes, True
        if type(one) is not type(two) or not isinstance(one, dict | list):
            if not is_same_content(one, two):
                yield f"{path} is in another state than in eager"
            return
        eager, ours = dict(steps_of(one)), dict(steps_of(two))
        for key in dict.fromkeys([*eager, *ours]):
            step = f"{path}.{key}" if is_named and isinstance(key, str) else f"{path}[{key!r}]"
            step = path if key == "its numbers" else step
            if key in eager and key in ours:
                yield from self._items(eager[key], ours[key], step)
            else:
                texts = [_text(each[key]) if key in each else "absent" for each in (ours, eager)]
                yield f"{step} is {texts[0]}, and {texts[1]} in eager"

    def _items(self, one: Any, two: Any, path: str) -> Iterator[str]:
        if type(one) is not type(two):
            yield f"{path} is {_text(two)}, and {_text(one)} in eager"
        elif isinstance(one, Mark | Fingerprint):
            numbers = [each.numbers if isinstance(each, Mark) else each for each in (one, two)]
            found = numbers[0].difference(numbers[1], self._tolerance)
            if found:
                yield f"{path} {found}"
            elif isinstance(one, Mark) and one.parameter != two.parameter:
                yield f"{path} is another parameter than in eager"
        elif isinstance(one, Reference):
            yield from self._references(one, two, path)
        elif isinstance(one, tuple):
            yield from self._contents(list(one), list(two), path, is_named=False)
        elif repr(one) != repr(two) and not (
            type(one) is float  # that was read of a tensor
            and math.isclose(one, two, rel_tol=self._tolerance, abs_tol=self._tolerance)
        ):
            yield f"{path} is {_text(two)}, and {_text(one)} in eager"

    def _references(self, one: Reference, two: Reference, path: str) -> Iterator[str]:
        if one.kind is not two.kind or one.name != two.name:
            yield f"{path} is {_text(two)}, and {_text(one)} in eager"
            return
        if (one.key, two.key) in self._seen:
            return
        self._seen.add((one.key, two.key))
        known = self._before.objects.found
        if one.key == two.key and one.key in known:
            return  # its own changes are compared by themselves
        if issubclass(one.kind, nn.Module) and (one.key in known) != (two.key in known):
            yield f"{path} is another module than in eager"
            return
        contents = self._content(self._eager, one.key), self._content(self._ours, two.key)
        if None not in contents:
            yield from self._contents(*contents, path, is_named=not issubclass(one.kind, dict))


def _text(value: Any) -> str:
    if isinstance(value, Mark | Fingerprint):
        numbers = value.numbers if isinstance(value, Mark) else value
        return f"a tensor {str(numbers.dtype).removeprefix('torch.')}{list(numbers.shape)}"
    if isinstance(value, Reference):
        return value.name or f"a {value.kind.__qualname__}"
    return f"{value!r:.100}"
