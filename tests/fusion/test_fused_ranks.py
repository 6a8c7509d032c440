"""Two processes that measure different kernels as fast run the same groups and train alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import rockmate.fusion.kernels
from rockmate import RockmateModule
from rockmate.fusion.report import FusionReport

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="needs gloo"
)

NUM_RANKS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(torch.tanh(h * 0.5) * h + 1)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(rank: int, *, is_planned: bool) -> tuple[list[Tensor], RockmateModule | nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).train()
    module = RockmateModule(model, batch(rank, 0), 1.0, kernels="fused") if is_planned else model
    parallel = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], module


def check(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS
    )
    # A clock by which no kernel is fast enough on the second rank, and each is on the first.
    times = iter([1.0 + rank, 1.5] * 1000)
    rockmate.fusion.kernels.time_ms = lambda *_: next(times)
    weights, module = trained(rank, is_planned=True)
    assert isinstance(module, RockmateModule)
    report = module.plan.fusion
    assert isinstance(report, FusionReport)
    found: list[object] = [None] * NUM_RANKS
    own = module.plan.options["unfused"], report.num_places, module.plan.schedule.steps
    distributed.all_gather_object(found, own)
    assert found[0] == found[1]
    expected, _ = trained(rank, is_planned=False)
    for mine, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    distributed.destroy_process_group()


def test_ranks_take_the_groups_of_the_first(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(check, (str(tmp_path / "store"),), nprocs=NUM_RANKS)
