"""What could stand in for the legacy profiler, which PyTorch has announced to remove."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch._C._autograd as profilers
from torch import nn
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.profiler import ProfilerActivity

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
