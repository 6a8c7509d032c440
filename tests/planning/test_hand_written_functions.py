"""Autograd functions that libraries write by hand to save memory are planned op by op.

They write into slices of buffers. A plan does the same, and needs no more memory than eager.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rockmate import Planner, timeline
from rockmate.graph.in_place import operands_in_place

_WIDTH, _WORDS, _TILE = 32, 2048, 256
_aten = torch.ops.aten


class TiledLogProbabilities(torch.autograd.Function):
    """As TRL's: tiles of the vocabulary in one buffer, sums into slices, tiles recomputed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        normalizer, chosen = torch.full(hidden.shape[:1], float("-inf")), torch.zeros(len(hidden))
        tile = torch.empty(len(hidden), _TILE)
        for start in range(0, len(weight), _TILE):
            torch.mm(hidden, weight[start : start + _TILE].t(), out=tile)
            torch.logaddexp(normalizer, tile.logsumexp(-1), out=normalizer)
            place = (labels - start).clamp(0, _TILE - 1)
            found = tile.gather(1, place[:, None]).squeeze(1)
            chosen[:] = torch.where(place == labels - start, found, chosen)
        ctx.save_for_backward(hidden, weight, labels, normalizer)
        return chosen - normalizer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore
        hidden, weight, labels, normalizer = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        tile = torch.empty(len(hidden), _TILE)
        for start in range(0, len(weight), _TILE):
            part = weight[start : start + _TILE]
            torch.mm(hidden, part.t(), out=tile)
            chosen = torch.arange(start, start + _TILE) == labels[:, None]
            tile.copy_((chosen.float() - (tile - normalizer[:, None]).exp()) * gradient[:, None])
            of_hidden.addmm_(tile, part)
            of_weight[start : start + _TILE].addmm_(tile.t(), hidden)
        return of_hidden, of_weight, None


class GradientsInForward(torch.autograd.Function):
    """As Liger's: the forward computes the gradients of a chunk right after its loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        losses = torch.zeros(len(hidden))
        size = len(hidden) // 8
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            logits = hidden[rows] @ weight.t()
            scores = logits.log_softmax(-1)
            losses[rows] = -scores.gather(1, labels[rows, None]).squeeze(1)
            slope = scores.exp_()
            slope[torch.arange(size), labels[rows]] -= 1
            of_hidden[rows] = slope @ weight
            of_weight += slope.t() @ hidden[rows]
        ctx.save_for_backward(of_hidden, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * gradient, of_weight * gradient, None


class Net(nn.Module):
    """A word model whose head is a hand-written function."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.apply_function = function.apply

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found: Any = self.apply_function(self.words(words).tanh(), self.head.weight, labels)
        return {"loss": -nn.functional.logsigmoid(found).mean()}


@pytest.mark.parametrize("function", [TiledLogProbabilities, GradientsInForward])
def test_no_more_memory_than_eager_and_its_bits(function: type[torch.autograd.Function]) -> None:
    torch.manual_seed(0)
    model, words = Net(function), torch.randint(0, _WORDS, (256,))
    sample = {"words": words, "labels": words.flip(0)}

    def gradients(module: nn.Module) -> list[Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        module(**sample)["loss"].backward()
        return [parameter.grad for parameter in model.parameters()]  # pyright: ignore

    gradients(model)
    eager_bytes = timeline(lambda: model(**sample)["loss"].backward()).peak_bytes
    expected = gradients(model)
    planner = Planner(model, sample, outputs="loss", numerics="bitwise")
    assert planner.minimum_peak_bytes <= eager_bytes
    module = planner.module(planner.minimum_peak_bytes)
    assert all(map(torch.equal, gradients(module), expected))
    graph: Any = planner.plan(1.0).captured
    writes = [op.index for op in graph.ops if op.node.target is _aten.slice_scatter.default]
    assert len(writes) >= 8
    assert (operands_in_place(graph)[writes, 0] >= 0).all()


class WideTile(TiledLogProbabilities):
    """As TRL's for fewer words than a tile has."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        tile = torch.empty(len(hidden), 2 * _WORDS)[:, :_WORDS]
        torch.mm(hidden, weight.t(), out=tile)
        normalizer = tile.logsumexp(-1)
        ctx.save_for_backward(hidden, weight, labels, normalizer)
        return tile.gather(1, labels[:, None]).squeeze(1) - normalizer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore
        hidden, weight, labels, normalizer = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros(weight.shape)
        tile = torch.empty(len(hidden), 2 * _WORDS)[:, :_WORDS]
        torch.mm(hidden, weight.t(), out=tile)
        chosen = torch.arange(_WORDS) == labels[:, None]
        tile.copy_((chosen.float() - (tile - normalizer[:, None]).exp()) * gradient[:, None])
        of_hidden.addmm_(tile, weight)
        of_weight.addmm_(tile.t(), hidden)
        return of_hidden, of_weight, None


def test_a_tile_that_is_written_is_read_at_its_source_and_runs_in_chunks() -> None:
    torch.manual_seed(0)
    model, words = Net(WideTile), torch.randint(0, _WORDS, (1024,))
    sample = {"words": words, "labels": words.flip(0)}
    model(**sample)["loss"].backward()
    eager_bytes = timeline(lambda: model(**sample)["loss"].backward()).peak_bytes
    expected = [parameter.grad for parameter in model.parameters()]  # of two backwards
    planner = Planner(model, sample, outputs="loss")
    for budget, tolerance in ((1.0, 0.0), (int(0.25 * eager_bytes), 1e-6)):
        model.zero_grad()
        planner.module(budget)(**sample)["loss"].backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient / 2, rtol=tolerance, atol=tolerance)
