"""State of modules that a second run of their forward needs as it was, and leaves as it is.

A forward may read and change attributes, modes and buffers. When it runs again in the backward, it
reads what it read the first time, and its changes are thrown away.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from rockmate._torch.autocast import autocast_dtypes
from rockmate._torch.members import RECURRENT_WEIGHTS, tensor_tables
from rockmate._torch.storage import version_of

_CONTAINERS = (list, dict, set)
# Tables of members and hooks, and the forward that stands in for a frame's own.
_SKIPPED = (vars(nn.Module()).keys() | RECURRENT_WEIGHTS | {"forward"}) - {"training"}


class Attributes:
    """Attributes and modes of modules at one time, with the content of lists, dicts and sets."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Takes the present ones."""
        self._tables = [vars(module) for module in modules]
        self._values = [
            {name: value for name, value in table.items() if name not in _SKIPPED}
            for table in self._tables
        ]
        self._contents = [
            (value, copy.copy(value))
            for values in self._values
            for value in values.values()
            if type(value) in _CONTAINERS
        ]

    def restore(self) -> None:
        """Puts all of them back."""
        for container, content in self._contents:
            if container != content:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
        for table, values in zip(self._tables, self._values, strict=True):
            for name in table.keys() - values.keys() - _SKIPPED:
                del table[name]
            table.update(values)


class Buffers:
    """Copies of the buffers that a forward changes.

    Which ones these are is known from earlier calls. In the first one all are copied.
    """

    def __init__(self, modules: Sequence[nn.Module], changing: set[tuple[int, str]] | None) -> None:
        """Copies them before the forward.

        Args:
            modules: of the forward.
            changing: (position of the module, name) of those that change; None if not known yet.
        """
        self._owners, self._are_known = modules, changing is not None
        self._versions: dict[tuple[int, str], int] = {}
        self._copies: dict[tuple[int, str], torch.Tensor] = {}
        for key, buffer in self._present():
            self._versions[key] = version_of(buffer)
            if changing is None or key in changing:
                self._copies[key] = buffer.detach().clone()

    @property
    def copies(self) -> list[torch.Tensor]:
        """Those that are held."""
        return list(self._copies.values())

    def _present(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for position, module in enumerate(self._owners):
            for name, buffer in _buffers_of(module).items():
                if buffer is not None:
                    yield (position, name), buffer

    def changed(self) -> tuple[set[tuple[int, str]], bool]:
        """Those that the forward has changed, and whether there is a copy of each.

        Batch normalization changes its statistics without counting a write, so that values are
        compared in the first call. Copies of others are dropped.
        """
        found = {
            key
            for key, buffer in self._present()
            if self._versions.get(key) != version_of(buffer)
            or (key in self._copies and (self._are_known or self._differs(key, buffer)))
        }
        is_whole = found <= self._copies.keys()
        self._copies = {key: value for key, value in self._copies.items() if key in found}
        return found, is_whole

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
        """Has the copies stand in the place of the buffers, and yields them."""
        before = {key: buffer for key, buffer in self._present() if key in self._copies}
        try:
            for (position, name), value in self._copies.items():
                _buffers_of(self._owners[position])[name] = value.clone()
            yield [_buffers_of(self._owners[place])[name] for place, name in self._copies]
        finally:
            for (position, name), buffer in before.items():
                _buffers_of(self._owners[position])[name] = buffer


class RandomState:
    """Random state of the CPU and of the device that runs, at one time."""

    def __init__(self, device: torch.device) -> None:
        """Takes the present one."""
        self._device = device if device.type == "cuda" else None
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if self._device else None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """That hold the state."""
        return [each for each in (self._cpu, self._cuda) if each is not None]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Sets the state for what runs within."""
        now = RandomState(self._device or torch.device("cpu"))
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def restore(self) -> None:
        """Sets the state."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None and self._device is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


@contextmanager
def autocast_as(dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Runs with autocast on for these kinds of devices and off for others."""
    with ExitStack() as stack:
        for kind in autocast_dtypes().keys() - dtypes.keys():
            stack.enter_context(torch.autocast(kind, enabled=False))
        for kind, dtype in dtypes.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


@contextmanager
def attributes_as(before: Attributes, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Has attributes stand as they did before, for what runs within."""
    now = Attributes(modules)
    before.restore()
    try:
        yield
    finally:
        now.restore()


def _buffers_of(module: nn.Module) -> dict[str, Any]:
    return tensor_tables(module)[1]
