"""Frames of a model that FSDP2 shards over two processes, as without frames."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rockmate import RockmateModule

pytestmark = pytest.mark.model

NUM_RANKS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU())
        self.last, self.drop = nn.Linear(64, 32), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.last(self.layers(x)))


def trained(rank: int, *, is_framed: bool) -> tuple[list[Tensor], int]:
    """Losses and gradients of four steps, and how many frames ran twice in the last."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    framed = RockmateModule(model, None, 0.5, mode="frames", on_infeasible="least")
    module = framed if is_framed else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Tensor] = []
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        loss = module(torch.randn(64, 32)).square().mean()
        loss.backward()
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        found += [loss.detach(), *(gradient.to_local().clone() for gradient in gradients)]
        optimizer.step()
        optimizer.zero_grad()
    assert framed.frames is not None
    return found, framed.frames.counts.num_made_again


def enter(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS
    )
    ours, num_made_again = trained(rank, is_framed=True)
    expected, _ = trained(rank, is_framed=False)
    assert all(map(torch.equal, ours, expected))
    assert num_made_again > 0
    torch.distributed.destroy_process_group()


def test_two_processes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(enter, (f"{folder}/store",), nprocs=NUM_RANKS)
