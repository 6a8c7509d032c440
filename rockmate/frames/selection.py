"""Which submodules' calls are frames, and forwards that stand in for theirs.

Frames lie side by side, never within one another. What a frame reads from outside stays in memory,
so a frame should save much more than it reads: blocks of layers, not layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rockmate.capture.model_signature import FORWARD_BEFORE
from rockmate.frames.needs import StepNeeds

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Passed through; a sequence of layers alone is a frame."""
_MIN_FRAMES = 4
"""Fewer frames than this are split by their parameters before anything is measured."""
_LARGE_SHARE = 0.15
"""A frame that saves more than this share of all is split where it can be."""


def inner_paths(model: nn.Module, path: str) -> list[str]:
    """Paths of the outermost submodules of submodules within the one at `path`.

    Containers are passed through, and so is the one submodule of a wrapper. Layers without
    submodules are left out: they save little that they do not read. A sequence of several such
    layers is called as one, and saves what is between.
    """
    found, owner = [], model.get_submodule(path)
    is_wrapper = len([*owner.children()]) == 1 and type(owner) not in _CONTAINERS
    for name, child in owner.named_children():
        inner = f"{path}.{name}" if path else name
        # A second run ends by an exception, which TorchScript's interpreter turns into its own.
        has_script = any(isinstance(each, torch.jit.ScriptModule) for each in child.modules())
        if type(child) in _CONTAINERS or has_script:
            within = [] if isinstance(child, torch.jit.ScriptModule) else inner_paths(model, inner)
            is_sequence = isinstance(child, nn.Sequential) and len(child) > 1 and not has_script
            found += [inner] if is_sequence and not within else within
        elif next(child.children(), None) is not None:
            found += (is_wrapper and inner_paths(model, inner)) or [inner]
    return found


def first_paths(model: nn.Module) -> list[str]:
    """A first choice, by structure and numbers of parameters."""
    paths = inner_paths(model, "")
    while True:
        sizes = {path: _num_elements(model.get_submodule(path)) for path in paths}
        total = sum(sizes.values())
        splittable = [path for path in paths if inner_paths(model, path)]
        largest = max(splittable, key=sizes.__getitem__, default=None)
        if largest is None or (len(paths) >= _MIN_FRAMES and sizes[largest] <= total / 2):
            return paths
        paths = split(model, paths, largest)


def _num_elements(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters() if not nn.parameter.is_lazy(each))


def split(model: nn.Module, paths: list[str], which: str) -> list[str]:
    """The paths with one of them replaced by those within it."""
    place = paths.index(which)
    return [*paths[:place], *inner_paths(model, which), *paths[place + 1 :]]


def frames_to_split(model: nn.Module, needs: StepNeeds, budget_bytes: int) -> list[str]:
    """Frames that save a large share of all; or those at the peak, if the budget is below."""
    saved: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for key, each in needs.by_key.items():
        saved[key.path] = max(saved.get(key.path, 0), each.saved_bytes)
        peaks[key.path] = max(peaks.get(key.path, 0), each.peak_bytes)
    total = sum(saved.values())
    large = [path for path in saved if saved[path] > _LARGE_SHARE * total]
    if budget_bytes < needs.minimum_bytes:
        large += [path for path in peaks if peaks[path] > budget_bytes and path not in large]
    return [path for path in large if len(inner_paths(model, path)) > 1]


# --- replaced forwards ----------------------------------------------------------------------------


class ReplacedForwards:
    """Attributes of instances that stand in the way of their `forward`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[dict[str, Any], Any, Any]] = []  # table, before, now

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Replaces the forward of one."""
        table = vars(module)
        vars(forward)[FORWARD_BEFORE] = table.get("forward")
        self._replaced.append((table, table.get("forward"), forward))
        table["forward"] = forward

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Has all as before within."""
        self.put_back()
        try:
            yield
        finally:
            for table, _, forward in self._replaced:
                table["forward"] = forward

    def put_back(self) -> None:
        """Puts all back, the last one first."""
        for table, forward, _ in reversed(self._replaced):
            table.pop("forward")
            if forward is not None:
                table["forward"] = forward
