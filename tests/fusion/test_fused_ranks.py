"""Two processes that measure different kernels as fast run the same kernels and train alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fused_blocks import Block
from ranks import needs_gloo, run_processes
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import rockmate.fusion.kernels
from rockmate import RockmateModule
from rockmate.fusion.report import FusionReport
from rockmate.planning.form import Found
from rockmate.planning.forms import Forms

pytestmark = needs_gloo

NUM_RANKS = 2


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(rank: int, kernels: str | None) -> tuple[list[Tensor], RockmateModule | nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).train()
    module = RockmateModule(model, batch(rank, 0), 1.0, kernels=kernels) if kernels else model
    parallel = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], module


def best_of_rank(rank: int) -> Any:
    def best_within(forms: Forms, budget_bytes: int, strategy: str) -> Found | None:
        form = forms.chunked[rank].whole
        best = form.search(strategy).best_within(budget_bytes)
        return best and Found(form, best)

    return best_within


def check(rank: int, store: str, kernels: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS
    )
    # A clock by which no kernel is fast enough on the second rank, and each is on the first.
    times = iter([1.0 + rank, 1.5] * 1000)
    rockmate.fusion.kernels.time_ms = lambda *_: next(times)
    if kernels == "auto":  # each rank finds another form to be faster
        Forms.best_within = best_of_rank(rank)
    weights, module = trained(rank, kernels)
    assert isinstance(module, RockmateModule)
    report = module.plan.fusion
    assert kernels == "auto" or isinstance(report, FusionReport)
    num_places = report.num_places if isinstance(report, FusionReport) else 0
    found: list[object] = [None] * NUM_RANKS
    own = module.plan.options, num_places, module.plan.schedule.steps
    distributed.all_gather_object(found, own)
    assert found[0] == found[1]
    expected, _ = trained(rank, None)
    for mine, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    distributed.destroy_process_group()


@pytest.mark.parametrize("kernels", ["fused", "auto"])
def test_ranks_take_the_kernels_of_the_first(kernels: str, tmp_path: Path) -> None:
    given: Any = (str(tmp_path / "store"), kernels)
    run_processes(check, given, NUM_RANKS)
