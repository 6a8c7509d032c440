"""Tensors of modules and autocast, as a second run of a forward needs them.

A forward may change buffers. When it runs again in the backward, it reads what it read the first
time, and its changes are thrown away. Parameters and other buffers are not copied; one that was
changed in place meanwhile may not be read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rockmate._torch.autocast import autocast_dtypes
from rockmate._torch.members import modules_within, tensor_tables
from rockmate._torch.storage import version_of, versions_of
from rockmate.state.tensors import PLAIN

_MOST_STATISTICS = 1 << 13
"""Elements of a buffer in one dimension that is always copied."""


class ChangingBuffers:
    """Which buffers the forwards of each path change, as known from their calls.

    Modes count, too: batch normalization changes its statistics in training alone.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, set[tuple[int, str]]] = {}
        self._doubtful: set[Hashable] = set()

    def of(self, which: Hashable) -> set[tuple[int, str]] | None:
        """(Position of the module, name) of each; None if that is not known."""
        return None if which in self._doubtful else self._known.get(which)

    def note(self, which: Hashable, changed: set[tuple[int, str]], *, is_whole: bool) -> None:
        """What a call has changed.

        Args:
            which: path and modes.
            changed: buffers.
            is_whole: whether no other one can have changed; else the next call compares all.
        """
        self._known.setdefault(which, set()).update(changed)
        (self._doubtful.discard if is_whole else self._doubtful.add)(which)


class Buffers:
    """Copies of the buffers that a forward changes.

    Which ones these are is known from earlier calls. In the first one all are copied. Statistics
    are copied always, since batch normalization changes them without counting a write.
    """

    def __init__(self, modules: Sequence[nn.Module], changing: set[tuple[int, str]] | None) -> None:
        """Copies them before the forward.

        Args:
            modules: of the forward.
            changing: (position of the module, name) of those that change; None if not known yet.
        """
        self._owners, self._are_known = modules, changing is not None
        self._tables = {
            position: dict(table)
            for position, module in enumerate(modules) if (table := _buffers_of(module))
        }  # fmt: skip
        self._versions: dict[tuple[int, str], int] = {}
        self._copies: dict[tuple[int, str], torch.Tensor] = {}
        for key, buffer in self._present():
            self._versions[key] = version_of(buffer)
            if changing is None or key in changing or _is_statistic(buffer):
                self._copies[key] = buffer.detach().clone()

    @property
    def copies(self) -> list[torch.Tensor]:
        """Those that are held."""
        return list(self._copies.values())

    @property
    def uncopied(self) -> list[torch.Tensor]:
        """Those that the forward does not change."""
        return [
            buffer for position, table in self._tables.items()
            for name, buffer in table.items()
            if buffer is not None and (position, name) not in self._copies
        ]  # fmt: skip

    def _present(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for position, module in enumerate(self._owners):
            table = _buffers_of(module)
            for name, buffer in table.items() if table else ():
                if buffer is not None:
                    yield (position, name), buffer

    def changed(self) -> tuple[set[tuple[int, str]], bool]:
        """Those that the forward has changed, and whether there is a copy of each.

        Values are compared in the first call. Copies of others are dropped.
        """
        found = {key for key, buffer in self._present() if self._has_changed(key, buffer)}
        is_whole = found <= self._copies.keys()
        self._copies = {key: value for key, value in self._copies.items() if key in found}
        for position, name in self._copies:  # not held twice
            self._tables[position].pop(name, None)
        return found, is_whole

    def _has_changed(self, key: tuple[int, str], buffer: torch.Tensor) -> bool:
        position, name = key
        if self._versions.get(key) != version_of(buffer):
            return True
        if self._tables.get(position, {}).get(name) is not buffer:
            return True
        is_kept = self._are_known or _is_statistic(buffer)
        return key in self._copies and (is_kept or self._differs(key, buffer))

    def _differs(self, key: tuple[int, str], buffer: torch.Tensor) -> bool:
        return not torch.equal(self._copies[key], buffer)

    def restore(self) -> None:
        """Copies the values back."""
        with torch.no_grad():
            for key, buffer in self._present():
                if key in self._copies:
                    buffer.copy_(self._copies[key])

    @contextmanager
    def put_back(self) -> Iterator[list[torch.Tensor]]:
        """Has all buffers be what they were, copies in the place of some, and yields these."""
        places = {*self._tables, *(position for position, _ in self._copies)}
        before = [(table, dict(table)) for place in places if (table := self._table(place))]
        try:
            for position, held in self._tables.items():
                self._table(position).update(held)
            for (position, name), value in self._copies.items():
                _buffers_of(self._owners[position])[name] = value.clone()
            yield [_buffers_of(self._owners[place])[name] for place, name in self._copies]
        finally:
            for table, held in before:
                table.update(held)

    def _table(self, position: int) -> dict[str, Any]:
        return _buffers_of(self._owners[position])


def _is_statistic(buffer: torch.Tensor) -> bool:
    return buffer.dim() == 1 and buffer.is_floating_point() and buffer.numel() <= _MOST_STATISTICS


class Watched:
    """Tensors that a forward may read and has no copies of."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes their present numbers of in-place writes, and their memory."""
        self._tensors = tensors
        self._versions = versions_of(tensors)
        self._addresses = [_address(each) for each in tensors]

    @property
    def has_been_written(self) -> bool:
        """Whether any has been changed in place since."""
        return versions_of(self._tensors) != self._versions

    def changed(self) -> list[torch.Tensor]:
        """Those that have been changed in place since, or have other memory."""
        before = zip(self._versions, self._addresses, strict=True)
        return [
            tensor
            for tensor, known in zip(self._tensors, before, strict=True)
            if known != (version_of(tensor), _address(tensor))
        ]


def _address(tensor: torch.Tensor) -> int:
    """Of a plain tensor's memory; 0 of others."""
    try:
        return tensor.data_ptr() if type(tensor) in PLAIN else 0
    except RuntimeError:  # a sparse one
        return 0


def state_of(model: nn.Module) -> tuple[Hashable, ...]:
    """What decides, beside inputs, which tensors calls save.

    Which modules are in training mode, which parameters are trained, and autocast.
    """
    modules = modules_within(model)
    parameters = [p for each in modules for p in tensor_tables(each)[0].values()]
    modes = tuple([each.training for each in modules])
    trained = tuple([p is not None and p.requires_grad for p in parameters])
    return modes, trained, tuple(autocast_dtypes().items())


def _buffers_of(module: nn.Module) -> dict[str, Any]:
    return tensor_tables(module)[1]
