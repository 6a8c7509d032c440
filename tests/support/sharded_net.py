"""A small network for sharding, its training, and PyTorch's own sharding of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rockmate import RockmateModule

WIDTH, NUM_TOKENS, LENGTH = 64, 96, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Layers, and an embedding that is tied to the head."""

    def __init__(self, num_layers: int = 4, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
        # Wider ones, tied to the head, would know each token from the start: no loss, no gradients.
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(x).flatten(0, 1).float()
        return nn.functional.cross_entropy(scores, tokens.flatten())


class OddNet(Net):
    """Numbers of rows that two or three ranks do not divide, and one of one row."""

    def __init__(self) -> None:
        super().__init__(2, is_tied=False)
        self.embed = nn.Embedding(NUM_TOKENS + 1, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS + 1)
        for layer in self.layers:
            layer.up, layer.down = nn.Linear(WIDTH, 83), nn.Linear(83, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale.sum()


def net(num_layers: int = 4, *, is_tied: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(num_layers, is_tied=is_tied)


def batch(seed: int = 0, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, NUM_TOKENS, (size, LENGTH), generator=generator)


def sharded(model: Net, mesh: DeviceMesh | None = None, **options: Any) -> Net:
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def planned(
    model: nn.Module, budget: float | int, *, size: int = 8, **options: Any
) -> RockmateModule:
    return RockmateModule(
        model, batch(size=size), budget, on_infeasible="least", numerics="bitwise", **options
    )


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(
    module: nn.Module, model: nn.Module, seed: int, *, num_micro_batches: int = 1
) -> list[Tensor]:
    """Losses of three steps with clipped gradients, their norms, and the parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        torch.manual_seed(100 * step + seed)
        for number in range(num_micro_batches):
            loss = module(batch(1000 * number + 10 * step + seed))
            loss.backward()
            found.append(loss.detach().clone())
        found.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *map(whole, model.parameters())]


def trained_by_sgd(module: nn.Module, model: nn.Module, seed: int) -> list[Tensor]:
    """As `trained`; foreach kernels take no parameters of two meshes together."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), list[Tensor]()
    for step in range(3):
        torch.manual_seed(100 * step + seed)
        loss = module(batch(10 * step + seed))
        loss.backward()
        found.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *map(whole, model.parameters())]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert [torch.equal(*pair) for pair in zip(ours, theirs, strict=True)].count(False) == 0


def collectives_of(module: RockmateModule) -> list[str]:
    program = module._plans.runnables[0].runner.program
    return [text.removeprefix("rockmate.") for text, _ in program.collectives]
