"""What could stand in for the legacy profiler, which PyTorch has announced to remove."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch._C._autograd as profilers
from torch import Tensor, nn
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode

from rockmate._torch.allocator import timeline

Events = list[int]


def legacy(function: Callable[[], Any]) -> Events:
    return [after - before for (_, before), (_, after) in pairwise(timeline(function).points)]


def kineto(function: Callable[[], Any]) -> Events:
    config = ProfilerConfig(
        ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig()
    )
    activities = {ProfilerActivity.CPU}
    profilers._prepare_profiler(config, activities)
    profilers._enable_profiler(config, activities)
    function()
    events: Any = profilers._disable_profiler()
    return [event.nbytes() for event in events.events() if event.name() == "[memory]"]


class Storages(TorchDispatchMode):
    """Notes the storages of results when they come and when they go."""

    def __init__(self) -> None:
        super().__init__()
        self.events: Events = []
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in args:
            if isinstance(each, Tensor):
                self.known.add(each.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, Tensor):
                self.note(each.untyped_storage())
        return result

    def note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.events.append(storage.nbytes())
            weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, identity: int, num_bytes: int) -> None:
        self.known.discard(identity)
        self.events.append(-num_bytes)


def dispatched(function: Callable[[], Any]) -> Events:
    with Storages() as mode:
        function()
    return mode.events


def peak(events: Events) -> int:
    live = highest = 0
    for num_bytes in events:
        live += num_bytes
        highest = max(highest, live)
    return highest


def linear_layers() -> Callable[[], Any]:
    x, model = torch.randn(8, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    return lambda: model(x).sum().backward()


def convolution() -> Callable[[], Any]:
    x, model = torch.randn(4, 16, 32, 32, requires_grad=True), nn.Conv2d(16, 16, 3, padding=1)
    return lambda: model(x).sum().backward()


@pytest.mark.parametrize("make", [linear_layers, convolution])
def test_kineto_reports_the_events_of_the_legacy_profiler(
    make: Callable[[], Callable[[], Any]],
) -> None:
    function = make()
    function()
    assert kineto(function) == legacy(function)


def test_counting_storages_misses_what_kernels_allocate() -> None:
    function = convolution()
    function()
    assert peak(dispatched(function)) < 0.5 * peak(legacy(function))
