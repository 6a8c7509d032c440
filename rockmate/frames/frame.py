"""A frame: one call of a submodule, and what autograd has saved in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rockmate._torch.autocast import autocast_dtypes
from rockmate._torch.members import tensor_tables
from rockmate._torch.pytree import tree_leaves, tree_map
from rockmate._torch.storage import version_of
from rockmate.errors import BackwardError, UnsupportedModelError
from rockmate.frames.memory import FrameKey, Memory, storages_of
from rockmate.frames.module_state import (
    Attributes,
    Buffers,
    RandomState,
    attributes_as,
    autocast_as,
)


class _Saved(NamedTuple):
    """A saved tensor and the number of in-place writes to it at that time."""

    tensor: torch.Tensor
    version: int


class _CompleteError(Exception):
    """Ends a second run of a forward when everything is made that was dropped."""


class Slot:
    """What autograd holds in place of a tensor that a frame has saved."""

    __slots__ = ("frame", "index")

    def __init__(self, frame: Frame, index: int) -> None:
        self.frame, self.index = frame, index

    def __del__(self) -> None:
        self.frame.release(self.index)


class Frame:
    """One call of a submodule.

    Attributes:
        key: which call.
        order: position among all frames, by the beginning of their calls.
        num_bytes: bytes of the storages that it has saved and nobody else holds.
        seconds: that its forward took.
        is_made_again: whether it was dropped and its forward has run again. It then stays.
        is_pinned: whether it cannot be dropped, since its forward cannot run again.
    """

    def __init__(
        self,
        key: FrameKey,
        order: int,
        module: nn.Module,
        call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
        memory: Memory,
    ) -> None:
        """Takes the state that a second run of the call needs.

        Args:
            key: which call.
            order: see above.
            module: the submodule.
            call: its own forward, and the arguments.
            memory: counts what frames hold.
        """
        self.key, self.order, self._module, self._call, self._memory = (
            key, order, module, call, memory,
        )  # fmt: skip
        self._inputs = [each for each in tree_leaves(call[1:]) if isinstance(each, torch.Tensor)]
        self._versions = list(map(version_of, self._inputs))
        self._submodules = list(module.modules())
        self._attributes = Attributes(self._submodules)
        self._kept_buffers = Buffers(self._submodules, memory.changing_buffers.get(key.path))
        self._random_state = RandomState(memory.device)
        self._autocast = autocast_dtypes()
        self._outside = self._outside_storages()
        self._saved: list[_Saved | None] | None = []
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._dead: set[int] = set()
        self._returned: dict[int, _Saved] = {}  # saved tensors that are results of the call
        self._num_to_make = 0  # how many saved tensors a second run has to reach
        self.num_bytes, self.seconds = 0, 0.0
        self.is_made_again = self.is_pinned = False

    def _outside_storages(self) -> dict[int, torch.Tensor]:
        """Storages that are in memory whether or not the frame is dropped.

        Their tensors are held meanwhile: a forward may put another tensor in the place of a buffer,
        and the storage of an activation may then get the address of the old one.
        """
        members = chain.from_iterable(
            table.values() for module in self._submodules for table in tensor_tables(module)
        )
        tensors = [each for each in (*self._inputs, *members) if each is not None]
        return {key: tensor for tensor in tensors for key in storages_of(tensor)}

    # --- the forward ------------------------------------------------------------------------------

    def run(self) -> Any:
        """The call's result. What autograd saves meanwhile goes into the frame."""
        forward, args, kwargs = self._call
        begin = time.perf_counter()
        with saved_tensors_hooks(self._pack, self._unpack):
            output = forward(*args, **kwargs)
        self.seconds = time.perf_counter() - begin
        self._outside = {}
        changed, is_whole = self._kept_buffers.changed()
        self._memory.changing_buffers.setdefault(self.key.path, set()).update(changed)
        self.is_pinned = not is_whole or self._changed_inputs()
        self._keep_outputs(output)
        return output

    def _keep_outputs(self, output: Any) -> None:
        """Takes the saved tensors that the call also returns: their reader has them anyway."""
        assert self._saved is not None
        tensors = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        returned = {key for tensor in tensors for key in storages_of(tensor)}
        for index, saved in enumerate(self._saved):
            if saved is not None and returned.issuperset(storages_of(saved.tensor)):
                self.num_bytes -= self._memory.let_go(saved.tensor)
                self._returned[index] = saved
                self._saved[index] = None
        self._num_to_make = 1 + max(
            (index for index, saved in enumerate(self._saved) if saved is not None), default=-1
        )

    def roll_back(self) -> None:
        """Undoes what an unfinished run has changed: attributes, buffers and random state."""
        self._attributes.restore()
        self._kept_buffers.restore()
        self._random_state.restore()

    def _changed_inputs(self) -> bool:
        return self._versions != list(map(version_of, self._inputs))

    def _pack(self, tensor: torch.Tensor) -> Any:
        keys = storages_of(tensor)
        saved = _Saved(tensor, version_of(tensor))
        if all(key in self._outside for key in keys):
            return saved
        assert self._saved is not None
        slot = Slot(self, len(self._saved))
        self._saved.append(_Saved(tensor.detach(), saved.version))
        self._shapes.append((tensor.shape, tensor.dtype))
        self.num_bytes += self._memory.hold(tensor)
        return slot

    # --- the backward -----------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            msg = (
                "a backward with create_graph=True, for a second derivative, cannot run through "
                "frames. Call the plain model for that step."
            )
            raise BackwardError(msg)
        if isinstance(packed, Slot):
            self._memory.begin_backward(self)
            saved = self._returned.get(packed.index)
            if saved is None:
                if self._saved is None:
                    self._make_again()
                assert self._saved is not None
                saved = self._saved[packed.index]
        else:
            saved = packed
        assert saved is not None
        if version_of(saved.tensor) != saved.version:
            msg = (
                f"a tensor that {self.key} needs for its gradient has been changed in place: it is "
                f"at version {version_of(saved.tensor)}, and version {saved.version} was saved."
            )
            raise RuntimeError(msg)
        return saved.tensor

    def drop(self) -> None:
        """Gives up all that is saved, until the backward reads it."""
        assert self._saved is not None
        for saved in self._saved:
            if saved is not None:
                self._memory.let_go(saved.tensor)
        self._saved = None

    @property
    def is_dropped(self) -> bool:
        """Whether it holds nothing until its forward runs again."""
        return self._saved is None

    @property
    def can_drop(self) -> bool:
        """Whether dropping gives memory back, and the call can run again later."""
        is_held = bool(self._saved) and self.num_bytes > 0
        return is_held and not (self.is_made_again or self.is_pinned or self._changed_inputs())

    def release(self, index: int) -> None:
        """Autograd needs one of the tensors no more."""
        self._dead.add(index)
        self._returned.pop(index, None)
        if self._saved is not None and index < len(self._saved):
            saved, self._saved[index] = self._saved[index], None
            if saved is not None:
                self._memory.let_go(saved.tensor)

    def _make_again(self) -> None:
        """Runs the forward again, for what was dropped."""
        if self._changed_inputs():
            msg = (
                f"an input of {self.key} was changed in place after its call, and the call has to "
                f"run again. Leave it whole: keep={[self.key.path]!r}, or change a copy."
            )
            raise UnsupportedModelError(msg)
        begin = time.perf_counter()
        made: list[_Saved | None] = []
        forward, *call = self._call
        args, kwargs = tree_map(_detached, tuple(call))
        with (
            self._as_it_was() as outside,
            suppress(_CompleteError),
            saved_tensors_hooks(self._collector(made, outside), _refuse),
        ):
            forward(*args, **kwargs)
        found = [(each.tensor.shape, each.tensor.dtype) for each in made if each is not None]
        if len(made) != self._num_to_make:
            raise self._not_repeated(f"{self._num_to_make} tensors", f"{len(found)}")
        for index in self._dead | self._returned.keys():
            if index < len(made):
                made[index] = None
        for each in made:
            if each is not None:
                self._memory.hold(each.tensor)
        self._saved, self.is_made_again = made, True
        self._memory.note_made_again(time.perf_counter() - begin)

    def _collector(
        self, made: list[_Saved | None], outside: Mapping[int, torch.Tensor]
    ) -> Callable[[torch.Tensor], None]:
        def collect(tensor: torch.Tensor) -> None:
            if all(key in outside for key in storages_of(tensor)):
                return
            index = len(made)
            known = (tensor.shape, tensor.dtype)
            if known != self._shapes[index]:
                raise self._not_repeated(_text(*self._shapes[index]), _text(*known))
            made.append(_Saved(tensor.detach(), version_of(tensor)))
            if len(made) == self._num_to_make:
                raise _CompleteError

        return collect

    def _not_repeated(self, first: str, second: str) -> UnsupportedModelError:
        msg = (
            f"{self.key} does not repeat itself: its forward saved {first}, and {second} when it "
            "ran again. It depends on state outside of it, such as Python's random numbers. Leave "
            f"it whole: keep={[self.key.path]!r}."
        )
        return UnsupportedModelError(msg)

    @contextmanager
    def _as_it_was(self) -> Iterator[Mapping[int, torch.Tensor]]:
        """State as in the first run; yields the storages outside of the frame."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._memory.inside_frame())
            stack.enter_context(self._random_state.put_back())
            stack.enter_context(autocast_as(self._autocast))
            stack.enter_context(attributes_as(self._attributes, self._submodules))
            buffers = stack.enter_context(self._kept_buffers.put_back())
            copies = {key: each for each in buffers for key in storages_of(each)}
            yield {**self._outside_storages(), **copies}


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _refuse(_: Any) -> Any:
    msg = "a backward within a forward that runs again"
    raise BackwardError(msg)


def _text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"a tensor {str(dtype).removeprefix('torch.')}{list(shape)}"
