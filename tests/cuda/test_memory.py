"""On a GPU, measured peaks stay within the budget and near the prediction, a step waits for nothing
on the host, and a memory limit holds for the whole device."""

from __future__ import annotations

import models
import pytest
import torch
from helpers import no_waits
from torch import nn

from bench.measure import allocator_peak
from bench.models import built, makers
from rockmate import Planner, RockmateModule

MIB = 1 << 20


def stack_on(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    rows = 32768 if device.type == "cuda" else 256
    model = models.Stack(num_layers=8, width=512).to(device).train()
    return model, torch.randn(rows, 512, device=device)


@pytest.mark.parametrize("share", [1.0, 0.6, 0.35])
def test_the_measured_peak_is_the_predicted_one(device: torch.device, share: float) -> None:
    model, batch = stack_on(device)
    module = RockmateModule(model, batch, share)

    def step() -> None:
        # The prediction counts the output to the end of the backward.
        output = module(batch)
        output.square().mean().backward()

    step()
    step()
    peak_bytes = allocator_peak(step, device=device)
    loss_bytes = 4096  # outside of the module
    assert peak_bytes <= module.plan.budget_bytes + loss_bytes
    assert peak_bytes >= 0.99 * module.plan.predicted_peak_bytes


def test_reserved_memory_stays_near_the_budget_over_many_sizes(cuda: torch.device) -> None:
    model, batch = stack_on(cuda)
    module = RockmateModule(model, batch, 0.35)
    sizes = (32768, 26001, 17003)
    for num_rows in sizes:
        module(batch[:num_rows].clone()).square().mean().backward()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved()
    for num_rows in 8 * sizes:
        module(batch[:num_rows].clone()).square().mean().backward()
    torch.cuda.synchronize()
    reserved_bytes = torch.cuda.memory_reserved() - before_bytes
    assert reserved_bytes <= 1.25 * (module.plan.budget_bytes + batch.nbytes)


@pytest.mark.parametrize("name", ["gpt2-medium", "llama-1b", "bert-large", "resnet-50"])
def test_a_planned_step_does_not_wait_for_the_device(cuda: torch.device, name: str) -> None:
    make = makers("gpu")[name]
    workload = built(name, make, tiny=True, device=cuda, dtype=torch.bfloat16)
    model, batch = workload.model, workload.sample
    planner = Planner(model, batch)
    module = planner.module(planner.minimum_peak_bytes, trial="never")
    for _ in range(2):
        module(**batch).loss.backward()
    torch.cuda.synchronize()
    with no_waits():
        module(**batch).loss.backward()


def test_training_stays_within_a_limit_on_the_device(cuda: torch.device) -> None:
    # Other processes on the device count, too: run it alone. What the allocator has in reserve does
    # not: it gives that back before memory runs out.
    def outside_bytes() -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(cuda)
        return total_bytes - free_bytes - torch.cuda.memory_reserved(cuda)

    model, batch = stack_on(cuda)
    limit_bytes = outside_bytes() + torch.cuda.memory_allocated(cuda) + 2000 * MIB
    module = RockmateModule(model, batch, memory_limit=limit_bytes, optimizer="adamw")
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cuda.reset_peak_memory_stats(cuda)
    for _ in range(5):
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert outside_bytes() + torch.cuda.max_memory_allocated(cuda) <= limit_bytes


def test_costs_are_kernel_times(cuda: torch.device) -> None:
    """A product of 2 x 8192^3 operations takes what its rate allows, and a tiny op microseconds."""
    model = nn.Linear(8192, 8192, bias=False).to(cuda, torch.bfloat16).train()
    planner = Planner(model, torch.randn(8192, 8192, device=cuda, dtype=torch.bfloat16))
    products_ms = 2 * 2 * 8192**3 / 2e15 * 1e3
    assert planner.baseline_ms > products_ms / 2
    tiny = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(cuda).train()
    assert Planner(tiny, torch.randn(8, 8, device=cuda)).baseline_ms < 1.0
