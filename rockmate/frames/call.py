"""One call of a submodule, with the state that a second run of it needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from rockmate._torch.autocast import autocast_as, autocast_dtypes
from rockmate._torch.dispatch import ops_observed
from rockmate._torch.dynamo import uncompiled_calls
from rockmate._torch.members import modules_within, tensor_tables
from rockmate._torch.storage import storage_id, versions_of
from rockmate.errors import UnsupportedModelError
from rockmate.frames.memory import Memory
from rockmate.frames.module_state import Buffers, Watched
from rockmate.frames.needs import FrameKey
from rockmate.frames.object_state import ObjectState
from rockmate.state.random_state import RandomState, random_state_kept
from rockmate.state.tensors import PLAIN, parts_of, storages_of, tensors_in, with_changed


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
        self.key, self._memory = key, memory
        self._arguments: Arguments | None = arguments
        self._forward = arguments.forward
        # The caller may change containers afterwards: lists of features, caches.
        self._rest = with_changed(lambda each: each, tuple(arguments[1:]))
        self._inputs = tensors_in(self._rest)
        self._versions = versions_of(self._inputs)
        self._submodules = modules_within(module)
        others = [*arguments.args, *arguments.kwargs.values()]
        # Sharded parameters are others while they are gathered.
        is_sharded = memory.agreement is not None
        roots = (each for each in others if type(each) not in PLAIN)
        self._objects = ObjectState(self._submodules, roots, has_members=not is_sharded)
        self._path_and_modes = key.path, tuple([each.training for each in self._submodules])
        changing = memory.changing_buffers.of(self._path_and_modes)
        self._kept_buffers = Buffers(self._submodules, changing)
        self._watched = Watched(self._objects.tensors)
        self._watched_buffers = Watched([])
        self._random_state = RandomState([memory.device], of_pytorch_alone=True)
        self._autocast = autocast_dtypes()
        self.cannot_repeat = False

    @property
    def num_bytes(self) -> int:
        """Of what it takes for a second run: arguments, and copies of state."""
        tensors = [*self._inputs, *self._kept_buffers.copies]
        parts = [part for tensor in tensors for part in parts_of(tensor)]
        return sum({storage_id(part): part.untyped_storage().nbytes() for part in parts}.values())

    def outside_storages(self) -> dict[int, torch.Tensor]:
        """Storages of arguments, parameters and buffers, each with a tensor that has it.

        The tensors are to be held while the storages count: a forward may put another tensor in the
        place of a buffer, and the storage of an activation may then get the address of the old one.
        """
        inputs = {key: tensor for tensor in self._inputs for key in storages_of(tensor)}
        return self._member_storages() | inputs

    def _member_storages(self) -> dict[int, torch.Tensor]:
        members = chain.from_iterable(
            table.values() for module in self._submodules for table in tensor_tables(module)
        )
        tensors = [each for each in members if each is not None]
        return {key: tensor for tensor in tensors for key in storages_of(tensor)}

    def run(self) -> Any:
        """The first run."""
        assert self._arguments is not None
        forward, args, kwargs = self._arguments
        self._arguments = None
        return forward(*args, **kwargs)

    def end(self) -> None:
        """After the first run: whether there can be another."""
        self._arguments = None
        changed, is_whole = self._kept_buffers.changed()
        self._memory.changing_buffers.note(self._path_and_modes, changed, is_whole=is_whole)
        self._watched_buffers = Watched(self._kept_buffers.uncopied)
        has_changed = self.has_changed_inputs() or self._watched.has_been_written
        self.cannot_repeat = has_changed or not is_whole

    def roll_back(self) -> None:
        """Undoes what an unfinished run has changed: attributes, buffers and random state."""
        self._objects.restore()
        self._kept_buffers.restore()
        self._random_state.restore()

    def has_changed_inputs(self) -> bool:
        """Whether an argument was changed in place since the call began."""
        return self._versions != versions_of(self._inputs)

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
                or buffer that the run reads; or the run draws random numbers of others.
        """
        if self.has_changed_inputs():
            msg = (
                f"an input of {self.key} was changed in place after its call, and the call has to "
                f"run again. Leave it whole: keep={[self.key.path]!r}, or change a copy."
            )
            raise UnsupportedModelError(msg)
        args, kwargs = with_changed(_Detached(), self._rest)
        with ExitStack() as stack:
            stack.enter_context(self._memory.foreign_random.refused(self._draws_foreign))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._memory.inside_frame())
            if self._memory.has_compiled_modules:
                stack.enter_context(uncompiled_calls())
            kept = random_state_kept([self._memory.device], of_pytorch_alone=True)
            stack.enter_context(kept)
            self._random_state.restore()
            stack.enter_context(autocast_as(self._autocast))
            stack.enter_context(self._objects.put_back())
            buffers = stack.enter_context(self._kept_buffers.put_back())
            copies = {key: each for each in buffers for key in storages_of(each)}
            changed = [*self._watched.changed(), *self._watched_buffers.changed()]
            if changed:
                stack.enter_context(self._refusing_to_read(changed))
            run = self._forward if forward is None else forward
            yield lambda: run(*args, **kwargs), self._member_storages() | copies

    def _refusing_to_read(self, changed: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        """Has an op that reads one of some tensors be an error."""
        storages = {key for tensor in changed for key in storages_of(tensor)}

        def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for tensor in tensors_in((args, kwargs)):
                if not storages.isdisjoint(storages_of(tensor)):
                    msg = (
                        f"a parameter, buffer or attribute of {self.key} was changed after its "
                        f"call, before the backward: {list(tensor.shape)}. Change it after the "
                        f"backward, or leave the submodule whole: keep={[self.key.path]!r}."
                    )
                    raise UnsupportedModelError(msg)
            return op(*args, **kwargs)

        return ops_observed(run)

    def _draws_foreign(self) -> UnsupportedModelError:
        msg = (
            f"{self.key} draws random numbers of Python or NumPy, which cannot be drawn again when "
            f"it runs again. Draw PyTorch's, or leave it whole: keep={[self.key.path]!r}."
        )
        return UnsupportedModelError(msg)

    def not_repeated(self, first: str, second: str) -> UnsupportedModelError:
        """The error of a second run that saves something else."""
        msg = (
            f"{self.key} does not repeat itself: its forward saved {first}, and {second} when it "
            "ran again. It depends on state outside of it, such as a global counter. Leave it "
            f"whole: keep={[self.key.path]!r}. If a first call sets the model up, run the plain "
            "model once before it is wrapped."
        )
        return UnsupportedModelError(msg)


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
