"""One call of a submodule, with the state that a second run of it needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from rockmate._torch.autocast import autocast_dtypes
from rockmate._torch.dynamo import uncompiled_calls
from rockmate._torch.members import tensor_tables
from rockmate._torch.storage import storage_id, version_of
from rockmate.errors import UnsupportedModelError
from rockmate.frames.memory import Memory
from rockmate.frames.module_state import (
    Attributes,
    Buffers,
    RandomState,
    attributes_as,
    autocast_as,
)
from rockmate.frames.needs import FrameKey
from rockmate.frames.storages import parts_of, storages_of, tensors_in, with_changed


class Arguments(NamedTuple):
    """A forward and what it is called with."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def sizes_of(arguments: Arguments) -> Hashable:
    """Shapes and types of the arguments that are tensors."""
    return tuple((each.shape, each.dtype, each.requires_grad) for each in tensors_in(arguments[1:]))


class Call:
    """A call that can run again.

    Attributes:
        key: which call.
        cannot_repeat: whether its forward cannot run again: it changed an input, or a buffer of
            which there is no copy.
    """

    def __init__(
        self, key: FrameKey, module: nn.Module, arguments: Arguments, memory: Memory
    ) -> None:
        """Takes the present state.

        Args:
            key: which call.
            module: the submodule.
            arguments: its own forward, and the arguments.
            memory: knows which buffers change.
        """
        self.key, self._arguments, self._memory = key, arguments, memory
        self._inputs = tensors_in(arguments[1:])
        self._versions = list(map(version_of, self._inputs))
        self._submodules = list(module.modules())
        self._attributes = Attributes(self._submodules)
        self._kept_buffers = Buffers(self._submodules, memory.changing_buffers.get(key.path))
        self._random_state = RandomState(memory.device)
        self._autocast = autocast_dtypes()
        self.cannot_repeat = False

    @property
    def num_bytes(self) -> int:
        """Of what it takes for a second run: arguments, and copies of state."""
        copies = [*self._random_state.tensors, *self._kept_buffers.copies]
        parts = [part for tensor in (*self._inputs, *copies) for part in parts_of(tensor)]
        return sum({storage_id(part): part.untyped_storage().nbytes() for part in parts}.values())

    def outside_storages(self) -> dict[int, torch.Tensor]:
        """Storages of arguments, parameters and buffers, each with a tensor that has it.

        The tensors are to be held while the storages count: a forward may put another tensor in the
        place of a buffer, and the storage of an activation may then get the address of the old one.
        """
        inputs = {key: tensor for tensor in self._inputs for key in storages_of(tensor)}
        return self._member_storages() | inputs

    def constant_storages(self) -> set[int]:
        """Storages of arguments and parameters, which are not to change before the backward."""
        parameters = (p for module in self._submodules for p in tensor_tables(module)[0].values())
        tensors = [*self._inputs, *(each for each in parameters if each is not None)]
        return {key for tensor in tensors for key in storages_of(tensor)}

    def _member_storages(self) -> dict[int, torch.Tensor]:
        members = chain.from_iterable(
            table.values() for module in self._submodules for table in tensor_tables(module)
        )
        tensors = [each for each in members if each is not None]
        return {key: tensor for tensor in tensors for key in storages_of(tensor)}

    def run(self) -> Any:
        """The first run."""
        forward, args, kwargs = self._arguments
        return forward(*args, **kwargs)

    def end(self) -> None:
        """After the first run: whether there can be another."""
        changed, is_whole = self._kept_buffers.changed()
        self._memory.changing_buffers.setdefault(self.key.path, set()).update(changed)
        self.cannot_repeat = not is_whole or self.has_changed_inputs()

    def roll_back(self) -> None:
        """Undoes what an unfinished run has changed: attributes, buffers and random state."""
        self._attributes.restore()
        self._kept_buffers.restore()
        self._random_state.restore()

    def has_changed_inputs(self) -> bool:
        """Whether an argument was changed in place since the call began."""
        return self._versions != list(map(version_of, self._inputs))

    @contextmanager
    def again(self) -> Iterator[tuple[Callable[[], Any], dict[int, torch.Tensor]]]:
        """State as in the first run.

        Yields the second run, and the storages of parameters and buffers in it.

        Raises:
            UnsupportedModelError: an argument was changed in place after the call.
        """
        if self.has_changed_inputs():
            msg = (
                f"an input of {self.key} was changed in place after its call, and the call has to "
                f"run again. Leave it whole: keep={[self.key.path]!r}, or change a copy."
            )
            raise UnsupportedModelError(msg)
        forward, *rest = self._arguments
        args, kwargs = with_changed(_detached, tuple(rest))
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._memory.inside_frame())
            if self._memory.has_compiled_modules:
                stack.enter_context(uncompiled_calls())
            stack.enter_context(self._random_state.put_back())
            stack.enter_context(autocast_as(self._autocast))
            stack.enter_context(attributes_as(self._attributes, self._submodules))
            buffers = stack.enter_context(self._kept_buffers.put_back())
            copies = {key: each for each in buffers for key in storages_of(each)}
            yield lambda: forward(*args, **kwargs), self._member_storages() | copies

    def not_repeated(self, first: str, second: str) -> UnsupportedModelError:
        """The error of a second run that saves something else."""
        msg = (
            f"{self.key} does not repeat itself: its forward saved {first}, and {second} when it "
            "ran again. It depends on state outside of it, such as Python's random numbers. Leave "
            f"it whole: keep={[self.key.path]!r}."
        )
        return UnsupportedModelError(msg)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value
