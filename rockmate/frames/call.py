"""One call of a submodule, with the state that a second run of it needs.

A forward may read and change parameters, buffers, attributes and modes of its modules, containers
and objects that are reached from these or from its arguments, and random numbers. When it runs a
second time, in the backward, it reads what it read the first time, and its changes are thrown away.
Of tensors only buffers that it changes in place are copied; any other one that was changed in place
meanwhile may not be read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from rockmate._torch.dispatch import ops_observed
from rockmate._torch.distributed import num_collectives
from rockmate._torch.dynamo import uncompiled_calls
from rockmate._torch.members import (
    member_tables_of,
    modules_within,
    parametrizations_afresh,
    tensor_tables,
)
from rockmate._torch.settings import Settings
from rockmate._torch.storage import storage_id, version_of, versions_of
from rockmate.capture.outer_values import objects_of_hooks
from rockmate.errors import UnsupportedModelError
from rockmate.frames.attributes import Attributes, follows_of_frame
from rockmate.frames.memory import Memory
from rockmate.frames.needs import FrameKey
from rockmate.state.call_state import CallState, outside_of
from rockmate.state.digest import bits_of
from rockmate.state.iterators import iterators_guarded
from rockmate.state.objects import Objects
from rockmate.state.random_state import RandomState, random_state_kept
from rockmate.state.tensors import (
    PLAIN,
    parts_of,
    storages_of,
    tensors_in,
    with_attributes_of,
    with_changed,
)

logger = logging.getLogger(__name__)

_MOST_OBJECTS = 256
"""How many are followed from one call beside its roots: a module may know the whole program."""
_MOST_STATISTICS = 1 << 13
"""Elements of a buffer in one dimension that is always copied: batch normalization changes its
statistics, and fake quantization its zero points, without counting a write."""


class Arguments(NamedTuple):
    """A forward and what it is called with."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def sizes_of(given: Any) -> Hashable:
    """Shapes and types of the tensors that a call is given."""
    return tuple((each.shape, each.dtype, each.requires_grad) for each in tensors_in(given))


class _Buffer(NamedTuple):
    """A buffer and a copy of it.

    Attributes:
        place: position of its module, and its name.
        table: in which it stands.
        tensor: the buffer.
        copy: its values.
    """

    place: tuple[int, str]
    table: dict[str, Any]
    tensor: torch.Tensor
    copy: torch.Tensor


class _Begin(NamedTuple):
    """What is noted when a call begins, beside what it copies."""

    versions: list[int]  # of the tensors among the arguments
    random_state: RandomState
    settings: Settings
    num_collectives: int
    num_items: int


class Call:
    """A call that can run again.

    Attributes:
        key: which call.
        cannot_repeat: whether its forward cannot run again: it changed an input, a parameter, or
            another tensor of which there is no copy; it took an item of an iterator; or it ran a
            collective, which no other rank would run again with it.
    """

    def __init__(
        self, key: FrameKey, module: nn.Module, arguments: Arguments, memory: Memory
    ) -> None:
        """Takes the present state.

        Args:
            key: which call.
            module: the submodule.
            arguments: its own forward, and the arguments.
            memory: knows which buffers change, and whether the model draws Python's numbers.
        """
        self.key, self._memory, self.cannot_repeat = key, memory, False
        memory.calls.kinds[key.path] = type(module)
        self._arguments: Arguments | None = arguments
        # The caller may change containers afterwards: lists of features, caches.
        self._given = Arguments(arguments.forward, *with_changed(lambda each: each, arguments[1:]))
        self.inputs = tensors_in(self._given[1:])
        self._submodules = modules_within(module)
        is_known = not memory.measuring.is_on and key.path not in memory.outside.writing
        self._outside = None if is_known else outside_of(self._submodules)
        others = [*arguments.args, *arguments.kwargs.values()]
        self._take_objects([each for each in others if type(each) not in PLAIN])
        self._take_buffers()
        outside = memory.outside
        random_state = RandomState([memory.device], of_pytorch_alone=outside.draws_foreign is False)
        counts = num_collectives(), outside.num_items
        self._begin = _Begin(versions_of(self.inputs), random_state, Settings.now(), *counts)

    # --- taking -----------------------------------------------------------------------------------

    def _take_objects(self, roots: list[Any]) -> None:
        """Takes attributes, members, and what is reached from these and from some roots."""
        attributes = [vars(each) for each in self._submodules]
        tables: list[dict[str, Any]] = []
        for found in map(member_tables_of, attributes):
            # Sharded parameters are others while they are gathered.
            known = found if self._memory.agreement is None else found[2:]
            tables += filter(None, known)
            tensors: Any = chain(*(table.values() for table in known[-2:]))
            own_tables = (vars(each) for each in tensors if each is not None)
            tables += [own for own in own_tables if own or self._outside is not None]
        of_hooks = objects_of_hooks(self._submodules)
        own = [Attributes(vars(e)) if isinstance(e, nn.Module) else e for e in of_hooks]
        self._roots = [*roots, *own, *map(Attributes, attributes), *tables]
        self._objects = _followed(self._roots)
        members = (each for table in tables for each in table.values())
        self._are_trained = [
            (each, each.requires_grad) for each in members if isinstance(each, nn.Parameter)
        ]

    def _take_buffers(self) -> None:
        """Copies buffers that change, as earlier calls have shown; in the first call all."""
        self._path_and_modes = self.key.path, tuple([each.training for each in self._submodules])
        changing = self._memory.outside.changing_buffers.get(self._path_and_modes)
        self._copied = [
            _Buffer((position, name), table, buffer, buffer.detach().clone())
            for position, module in enumerate(self._submodules)
            for table in tensor_tables(module)[1:]
            for name, buffer in (table.items() if table else ())
            if buffer is not None
            and (changing is None or (position, name) in changing or _is_statistic(buffer))
        ]
        watched = self._objects.tensors.values()
        self._known = [*zip(versions_of(watched), map(_address, watched), strict=True)]

    @property
    def num_bytes(self) -> int:
        """Of what it takes for a second run: arguments, and copies of state."""
        tensors = [*self.inputs, *[each.copy for each in self._copied]]
        parts = [part for tensor in tensors for part in parts_of(tensor)]
        return sum({storage_id(part): part.untyped_storage().nbytes() for part in parts}.values())

    def outside_storages(self) -> dict[int, torch.Tensor]:
        """Storages of arguments, parameters and buffers, each with a tensor that has it.

        The tensors are to be held while the storages count: a forward may put another tensor in the
        place of a buffer, and the storage of an activation may then get the address of the old one.
        """
        inputs = {key: tensor for tensor in self.inputs for key in storages_of(tensor)}
        return self._member_storages() | inputs

    def _member_storages(self) -> dict[int, torch.Tensor]:
        tables = (table for module in self._submodules for table in tensor_tables(module))
        tensors = [each for table in tables for each in table.values() if each is not None]
        return {key: tensor for tensor in tensors for key in storages_of(tensor)}

    def parameter_bits(self) -> list[int]:
        """Of each, a number for its values."""
        return [bits_of(each) for each, _ in self._are_trained]

    # --- the first run ----------------------------------------------------------------------------

    def run(self) -> Any:
        """The first run."""
        assert self._arguments is not None
        forward, args, kwargs = self._arguments
        self._arguments = None
        return forward(*args, **kwargs)

    def end(self) -> None:
        """After the first run: whether there can be another."""
        self._arguments = None
        watched = self._objects.tensors
        pairs = zip(watched, self._known, versions_of(watched.values()), strict=True)
        written = {key for key, (version, _), present in pairs if version != present}
        buffers = {
            id(buffer): (position, name)
            for position, module in enumerate(self._submodules)
            for name, buffer in (tensor_tables(module)[1] or {}).items()
        }
        known = self._memory.outside.changing_buffers
        if self._path_and_modes not in known:  # first: values are compared
            self._copied = [
                each
                for each in self._copied
                if id(each.tensor) in written
                or _is_statistic(each.tensor)
                or bits_of(each.copy) != bits_of(each.tensor)
            ]
        changing = known.setdefault(self._path_and_modes, set())
        changing |= {each.place for each in self._copied}
        changing |= {buffers[each] for each in written & buffers.keys()}
        written -= {id(each.tensor) for each in self._copied}
        if self._outside is not None and self._outside.has_changed():
            self._memory.outside.writing.add(self.key.path)
        else:
            self._outside = None
        self._note_items()
        has_met_others = self._begin.num_collectives != num_collectives()
        self.cannot_repeat = bool(written) or self.has_changed_inputs()
        self.cannot_repeat |= self.key.path in self._memory.outside.taking
        self.cannot_repeat |= has_met_others and self._memory.agreement is None

    def _note_items(self) -> None:
        taking, path = self._memory.outside.taking, self.key.path
        if self._begin.num_items == self._memory.outside.num_items or path in taking:
            return
        if not taking:
            logger.warning(
                "calls of %s, and others like them, never run again, since they take items of an "
                "iterator, which gives each once. Take the item outside of the model, and pass it "
                "as an argument.",
                path,
            )
        taking.add(path)

    def roll_back(self) -> None:
        """Undoes what an unfinished run has changed: attributes, buffers and random state."""
        self._restore_objects()
        with torch.no_grad():
            for each in self._copied:
                each.tensor.copy_(each.copy)
        self._begin.random_state.restore()

    def has_changed_inputs(self) -> bool:
        """Whether an argument was changed in place since the call began."""
        return self._begin.versions != versions_of(self.inputs)

    # --- the second run ---------------------------------------------------------------------------

    @contextmanager
    def again(
        self, forward: Callable[..., Any] | None = None
    ) -> Iterator[tuple[Callable[[], Any], dict[int, torch.Tensor]]]:
        """State as in the first run.

        Yields the second run, and the storages of parameters and buffers in it.

        Args:
            forward: what runs; None for the call's own.

        Raises:
            UnsupportedModelError: an argument was changed in place after the call, or a parameter
                or buffer that the run reads; or the run draws random numbers that are not known.
        """
        if self.has_changed_inputs():
            msg = (
                f"an input of {self.key} was changed in place after its call, and the call has to "
                f"run again. Leave it whole: keep={[self.key.path]!r}, or change a copy."
            )
            raise UnsupportedModelError(msg)
        args, kwargs = with_changed(_Detached(), self._given[1:])
        with ExitStack() as stack:
            stack.enter_context(self._random_put_back())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._memory.inside_frame())
            if self._memory.outside.has_compiled_modules:
                stack.enter_context(uncompiled_calls())
            stack.enter_context(self._begin.settings.applied())
            stack.enter_context(parametrizations_afresh())
            stack.enter_context(self._objects_put_back())
            changed = self._changed()
            if changed:
                stack.enter_context(self._refusing_to_read(changed))
            run = self._given.forward if forward is None else forward
            yield lambda: run(*args, **kwargs), self._member_storages()

    @contextmanager
    def _random_put_back(self) -> Iterator[None]:
        """Numbers as in the first run; those of the script are as they were behind it."""
        has_foreign, device = self._begin.random_state.has_foreign, self._memory.device
        of_pytorch_alone = not (has_foreign or self._memory.outside.draws_foreign)
        with random_state_kept([device], of_pytorch_alone=of_pytorch_alone) as before:
            self._begin.random_state.restore()
            yield
            if of_pytorch_alone or has_foreign:
                return
            drawn = before.differences(RandomState([device]))
        if {"Python", "NumPy"} & set(drawn):
            msg = (
                f"{self.key} draws random numbers of Python or NumPy, which no call of the model "
                f"did before, and cannot run again in this step. Leave it whole: "
                f"keep={[self.key.path]!r}, or run the step once more."
            )
            raise UnsupportedModelError(msg)

    @contextmanager
    def _objects_put_back(self) -> Iterator[None]:
        """Objects as in the first run, with copies in the place of buffers that it changed."""
        reached = [value for value, *_ in self._objects.found.values()]
        now = _followed([*self._roots, *reached])
        outside = outside_of(self._submodules) if self._outside else None
        are_trained = [(each, each.requires_grad) for each, _ in self._are_trained]
        self._restore_objects()
        try:
            for each in self._copied:
                each.table[each.place[1]] = with_attributes_of(each.tensor, each.copy.clone())
            yield
        finally:
            now.restore()
            if outside is not None:
                outside.restore()
            _train(are_trained)

    def _restore_objects(self) -> None:
        self._objects.restore()
        if self._outside is not None:
            self._outside.restore()
        _train(self._are_trained)

    def _changed(self) -> list[torch.Tensor]:
        """Tensors without a copy that were changed in place since, or have other memory."""
        copied = {id(each.tensor) for each in self._copied}
        return [
            tensor
            for tensor, known in zip(self._objects.tensors.values(), self._known, strict=True)
            if known != (version_of(tensor), _address(tensor)) and id(tensor) not in copied
        ]

    def _refusing_to_read(self, changed: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        """Has an op that reads one of some tensors be an error."""
        storages = {key for tensor in changed for key in storages_of(tensor)}

        def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for tensor in tensors_in((args, kwargs)):
                if not storages.isdisjoint(storages_of(tensor)):
                    msg = (
                        f"a parameter, buffer or attribute of {self.key} was changed after its "
                        f"call, before the backward: {list(tensor.shape)}. Change it after the "
                        "backward, or leave all like it whole: "
                        f"{self._memory.calls.alike(self.key.path)}."
                    )
                    raise UnsupportedModelError(msg)
            return op(*args, **kwargs)

        return ops_observed(run)

    def not_repeated(self, first: str, second: str) -> UnsupportedModelError:
        """The error of a second run that saves something else."""
        msg = (
            f"{self.key} does not repeat itself: its forward {first}, and {second} when it "
            "ran again. It depends on state outside of it, such as a global counter. Leave all "
            f"like it whole: {self._memory.calls.alike(self.key.path)}. If a first call sets the "
            "model up, run the plain model once before it is wrapped."
        )
        return UnsupportedModelError(msg)


@contextmanager
def items_noted(
    model: nn.Module, call: tuple[tuple[Any, ...], Mapping[str, Any]], memory: Memory
) -> Iterator[Any]:
    """Counts the items that a forward takes of iterators, if the step is measured.

    Yields the arguments of the call.
    """
    if not memory.measuring.is_on:
        yield call
        return
    before = CallState(model, *call)

    def note(_: str) -> None:
        memory.outside.num_items += 1

    with iterators_guarded(before.objects, note):
        yield before.arguments


class _Detached:
    """Leaves without their history; one that comes twice is one tensor, as attention asks."""

    def __init__(self) -> None:
        self._found: dict[int, torch.Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found = self._found.get(id(value))
        if found is None:
            found = value.detach().requires_grad_(value.requires_grad)
            vars(found).update(vars(value))  # attributes that users have set
            self._found[id(value)] = found
        return found


def _followed(roots: list[Any]) -> Objects:
    return Objects(roots, follows=follows_of_frame, most=_MOST_OBJECTS + len(roots))


def _is_statistic(buffer: torch.Tensor) -> bool:
    return buffer.dim() == 1 and buffer.numel() <= _MOST_STATISTICS


def _address(tensor: torch.Tensor) -> int:
    """Of a plain tensor's memory; 0 of others."""
    try:
        return tensor.data_ptr() if type(tensor) in PLAIN else 0
    except RuntimeError:  # a sparse one
        return 0


def _train(parameters: Sequence[tuple[nn.Parameter, bool]]) -> None:
    for parameter, is_trained in parameters:
        if parameter.requires_grad != is_trained:
            parameter.requires_grad_(is_trained)
