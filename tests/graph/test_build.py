"""Sizes of storages are those that the allocator of the device counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rockmate.costs.machine import load_machine
from rockmate.planning.step import capture_step


@pytest.mark.parametrize(("machine", "granularity"), [("cpu-avx2", 1), ("h200", 512)])
def test_storages_have_the_allocators_sizes(machine: str, granularity: int) -> None:
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5)).train()
    step = capture_step(model, torch.randn(11, 3), machine=load_machine(machine))
    (hidden,) = (op.writes[0] for op in step.graph.ops if op.name == "tanh")
    assert hidden.num_bytes == -(-11 * 7 * 4 // granularity) * granularity
    counted = [storage for storage in step.graph.storages if not storage.is_static]
    assert all(storage.num_bytes % granularity == 0 for storage in counted)
