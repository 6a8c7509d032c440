"""Training with moves to a disk: eager's bits, and the bytes that were predicted."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import models
import pytest
import torch
from helpers import assert_trains_alike, net_allocated, same_gradients, zero_gradients
from moves import X, layers, module_of, step
from schedules import verify
from torch import nn

from bench.measure import allocator_peak
from rockmate import Planner
from rockmate.offload.disk_tier import DiskTier
from rockmate.offload.tiers import tier_of
from rockmate.schedule.offload_request import OffloadRequest

NAMES = ("gpt2", "llama", "hf-resnet")
NOISE = 0.01


def planner_of(model: nn.Module, sample: object, folder: Path, **options: object) -> Planner:
    return Planner(model, sample, offload=f"disk:{folder}", **options)


def disk_of(model: nn.Module, folder: Path) -> DiskTier:
    tier = tier_of(model, OffloadRequest("disk", str(folder)))
    assert isinstance(tier, DiskTier)
    return tier


@pytest.mark.parametrize("name", NAMES)
def test_three_steps_have_the_bits_of_eager(name: str, tmp_path: Path) -> None:
    workload = models.tiny(name)
    eager = copy.deepcopy(workload.model)
    planner = planner_of(workload.model, workload.sample, tmp_path)
    module = planner.module((planner.minimum_peak_bytes + planner.baseline_peak_bytes) // 2)
    assert module.plan.schedule.moves, "nothing moves"
    verify(module.plan.graph, module.plan.schedule)

    def loss(callee: nn.Module, seed: int) -> torch.Tensor:
        batch = workload.make_batch(seed)
        output = callee(**{key: value for key, value in batch.items() if key != models.TARGET})
        return output.loss if name in models.HAS_OWN_LOSS else output.square().mean()

    assert_trains_alike(module, eager, loss, 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_measured_bytes_are_the_predicted_ones(name: str, share: float, tmp_path: Path) -> None:
    workload = models.medium(name)
    planner = planner_of(workload.model, workload.sample, tmp_path)
    least, most = planner.minimum_peak_bytes, planner.baseline_peak_bytes
    module = planner.module(int(least + share * (most - least)))
    plan = module.plan
    assert plan.schedule.moves
    zero_gradients(workload.model)
    one_step = models.step_of(module, workload, name)
    one_step()
    measured = allocator_peak(one_step)
    assert measured <= plan.budget_bytes
    assert abs(plan.predicted_peak_bytes / measured - 1) <= NOISE
    assert disk_of(workload.model, tmp_path).num_bytes == plan.simulation.host_bytes


def test_several_forwards_wait_for_their_backwards(tmp_path: Path) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    module = module_of(tmp_path, model, in_flight=3)
    batches = [torch.randn(128, 256) for _ in range(3)]

    def three(callee: nn.Module) -> None:
        outputs = [callee(x).square().mean() for x in batches]
        # The last is never differentiated.
        (outputs[1] + outputs[0]).backward()

    same_gradients(module, eager, three)
    disk = disk_of(model, tmp_path)
    gc.collect()
    assert disk.num_bytes == module.plan.simulation.host_bytes  # of the three
    module(batches[0]).sum().backward()
    assert disk.num_bytes == module.plan.simulation.host_bytes


def test_a_kept_graph_brings_its_values_back_twice(tmp_path: Path) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    module = module_of(tmp_path, model)

    def twice(callee: nn.Module) -> None:
        loss = callee(X).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    same_gradients(module, eager, twice)


def test_nothing_is_left_in_memory_after_a_step(tmp_path: Path) -> None:
    module = module_of(tmp_path)
    step(module)
    assert net_allocated(lambda: step(module)) == 0
