"""Frames of a model in two processes, sharded by FSDP2 or replicated, as without frames."""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
from made_of import made_of
from ranks import run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from rockmate import RockmateModule
from rockmate.frames.agreement import Agreement

NUM_RANKS = 2


class Block(nn.Module):
    """Draws in its attention, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU())
        self.last, self.drop = nn.Linear(64, 32), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[None]
        attended = nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.1)
        x = x + attended[0]
        return x + self.drop(self.last(self.layers(x)))


def trained(rank: int, *, is_framed: bool) -> tuple[list[Tensor], int]:
    """Losses and gradients of six steps, and how many frames ran twice in the last."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    framed = RockmateModule(model, None, 0.5, mode="frames", on_infeasible="least")
    module = framed if is_framed else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Tensor] = []
    for step in range(6):
        torch.manual_seed(10 * step + rank)
        # Now one rank has more rows, now the other; a profiler on one of them measures nothing.
        rows = 64 + 32 * ((rank + step) % 2) * step
        with torch.profiler.profile() if rank == step == 0 else nullcontext():
            loss = module(torch.randn(rows, 32)).square().mean()
            loss.backward()
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        found += [loss.detach(), *(gradient.to_local().clone() for gradient in gradients)]
        optimizer.step()
        optimizer.zero_grad()
    assert framed.frames is not None
    return found, framed.frames.counts.num_recomputed


def trained_in_parallel(rank: int, *, is_framed: bool) -> list[Tensor]:
    """Losses and gradients of four steps under DistributedDataParallel."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    framed = RockmateModule(model, None, 0.5, mode="frames", on_infeasible="least")
    module = DistributedDataParallel(framed if is_framed else model)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), list[Any]()
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        loss = module(torch.randn(64, 32)).square().mean()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]  # pyright: ignore
        optimizer.step()
        optimizer.zero_grad()
    return found


@made_of(lambda: {"inner": nn.ModuleList(Block() for _ in range(2)), "last": nn.Linear(32, 32)})
class Meeting(nn.Module):
    """A block whose ranks meet, with a frame in it that may be dropped."""

    def forward(self, x: Tensor) -> Tensor:
        mean = all_reduce(x.mean(0)) / NUM_RANKS
        for block in self.inner:
            x = block(x) if float(x.detach().sum()) < 1e9 else x
        return x + torch.tanh(self.last(x - mean))


def trained_meeting(rank: int, *, is_framed: bool) -> list[Tensor]:
    """Losses and gradients where the plain model runs collectives; budgets and rows differ."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Meeting() for _ in range(3)))
    share, found = (0.4, 0.9)[rank], list[Any]()
    framed = RockmateModule(model, None, share, mode="frames", on_infeasible="least")
    for step in range(10):
        torch.manual_seed(10 * step + rank)
        loss = (framed if is_framed else model)(torch.randn(64 + 32 * rank, 32)).square().mean()
        loss.backward()
        found += [loss.detach(), *(each.grad.clone() for each in model.parameters())]  # pyright: ignore
        model.zero_grad()
    assert framed.frames is not None
    if is_framed:
        assert framed.frames.paths == tuple(f"{i}.inner.{j}" for i in range(3) for j in range(2))
        assert rank or framed.frames.counts.num_dropped > 0
    return found


def enter(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS
    )
    ours, num_recomputed = trained(rank, is_framed=True)
    expected, _ = trained(rank, is_framed=False)
    assert all(map(torch.equal, ours, expected))
    agreed: list[Any] = [None] * NUM_RANKS
    torch.distributed.all_gather_object(agreed, num_recomputed)
    assert agreed[0] == agreed[1] > 0
    in_parallel = [trained_in_parallel(rank, is_framed=is_framed) for is_framed in (True, False)]
    assert all(map(torch.equal, *in_parallel))
    meeting = [trained_meeting(rank, is_framed=is_framed) for is_framed in (True, False)]
    assert all(map(torch.equal, *meeting))
    torch.distributed.destroy_process_group()
    # Gloo and the legacy profiler together: PyTorch aborts in about one teardown of fifty.
    os._exit(0)


def enter_chain(rank: int, store: str) -> None:
    """Ranks 0 and 2 share no parameter, but both share one with rank 1."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=3
    )
    meshes = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    model = nn.Module()
    for index, mesh in enumerate(meshes):
        if rank in mesh.mesh.tolist():
            shard = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
            model.register_parameter(f"p{index}", nn.Parameter(shard))
    agreement = Agreement(model)
    assert agreement.largest([rank, -rank]) == [2, 0]
    assert agreement.of_all(f"of rank {rank}") == ["of rank 0", "of rank 1", "of rank 2"]
    torch.distributed.barrier()
    os._exit(0)


def test_ranks_agree_that_meet_only_by_way_of_others() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_processes(enter_chain, (f"{folder}/store",), 3)


def test_two_processes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_processes(enter, (f"{folder}/store",), NUM_RANKS)
