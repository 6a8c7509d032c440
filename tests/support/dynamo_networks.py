"""Small models for the backend, and steps beside eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers import differing, gradients_of, same_bits, zero_gradients
from torch import Tensor, nn
from torch._dynamo import list_backends, register_backend
from torch.nn import functional

from rockmate import timeline
from rockmate.dynamo.backend import rockmate_backend

WIDTH = 48


def register() -> None:
    """Makes the backend known where the installation is older than its entry point."""
    if "rockmate" not in list_backends():
        register_backend(rockmate_backend, name="rockmate")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.norm(functional.gelu(self.linear(x))))


class Network(nn.Module):
    """Blocks with a loss; `break_at` breaks Dynamo's graph before that block."""

    def __init__(self, num_blocks: int = 4, *, break_at: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.break_at = break_at

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        first = self.blocks[: self.break_at]
        last = self.blocks[len(self.blocks) if self.break_at is None else self.break_at :]
        for block in first:
            x = block(x)
        if self.break_at is not None:
            torch._dynamo.graph_break()  # the break
        for block in last:
            x = block(x)
        return x.square().mean() * scale


class Looping(Network):
    """Dynamo gives up the whole frame, as the break stands in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x.square().mean()


class Deterministic(nn.Module):
    """Nothing in it depends on the mode."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return x.square().mean()


def batch(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclass
class Pair:
    """A model that is compiled, and an equal one that is not."""

    model: nn.Module
    options: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.eager = copy.deepcopy(self.model)
        self.compiled: Callable[..., Any] = torch.compile(
            self.model, backend="rockmate", options=self.options, **self.arguments
        )

    def check(self, *args: Any, seed: int = 0) -> None:
        """One more step of each has the same loss, gradients and buffers, bit for bit."""
        losses: list[Tensor] = []
        for call in (self.compiled, self.eager):
            torch.manual_seed(seed)
            loss = call(*args)
            loss.backward()
            losses.append(torch.cat([loss.detach().reshape(1), torch.rand(1)]))  # and its draws
        assert same_bits(*losses)
        assert differing(gradients_of(self.model), gradients_of(self.eager)) == []
        assert differing(self.model.state_dict(), self.eager.state_dict()) == []

    def peak_bytes(self, *args: Any) -> int:
        """The measured peak of a step, with `.grad` in place; nothing of the step stays."""
        before = copy.deepcopy(self.model.state_dict())
        gradients = [parameter.grad for parameter in self.model.parameters()]
        zero_gradients(self.model)
        peak_bytes = timeline(lambda: self.compiled(*args).backward()).peak_bytes
        self.model.load_state_dict(before)
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        return peak_bytes
