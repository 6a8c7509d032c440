"""Loss blocks and feed-forward blocks of Hugging Face architectures in chunks."""

from __future__ import annotations

import re

import architectures
import pytest
import torch
from chunk_cases import chunked, distance, eager, gradients, train
from made_of import made_of
from torch import nn
from torch.nn import functional

from rockmate import Plan, Planner
from rockmate.graph.chunking.chunks import Chunks, separable_blocks
from rockmate.graph.chunking.region import Refusal, Region
from rockmate.graph.ir import Op, Phase
from rockmate.graph.step_options import StepOptions
from rockmate.planning.step import capture_step


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "qwen3", "gemma2", "mistral", "opt", "bert", "t5", "whisper"]
)
def test_loss_blocks_of_architectures(name: str) -> None:
    architectures.skip_if_refused(name)
    step = capture_step(*architectures.case(name), StepOptions(outputs="loss"))
    for chunks in ("3 recompute", "3 at_once"):
        graph = chunked(step, chunks).graph
        rows = [op for op in graph.ops if op.node.target is torch.ops.aten._log_softmax.default]
        assert len(rows) == Chunks.parse(chunks).number


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_feed_forward_blocks(name: str) -> None:
    """Dropout and all: the masks are drawn as a whole, in eager's order."""
    model, batch = architectures.case(name)
    step = capture_step(model, batch, StepOptions(outputs="loss"))
    blocks = separable_blocks(step.capture).feed_forward.values()
    names = [block.name for block in blocks if isinstance(block, Region)]
    assert len(names) == 2
    assert all(re.search(r"mlp|intermediate", name) for name in names)
    # scores of queries x keys, and no fused projection
    refused = [block for block in blocks if isinstance(block, Refusal)]
    assert all(
        block.call.startswith("aten.bmm") and re.search(r"attn$|attention\.self$", block.block)
        for block in refused
    )
    inner = {
        op.node.meta["val"].shape[0]
        for op in chunked(step, "1 recompute, 3 in layers").graph.ops
        if _widens(op)
    }
    assert inner == {10, 11}  # of 2 x 16 rows
    torch.manual_seed(3)
    expected, reference = eager(model, batch, scale=3.0)
    for chunks in ("1 recompute, 3 in layers", "2 at_once, 5 in layers"):
        torch.manual_seed(3)
        assert distance(train(chunked(step, chunks), batch, scale=3.0), expected) <= 1e-6
        ours = gradients(model)  # side by side, since that of a key's bias is zero but for rounding
        assert (
            distance(
                *(
                    torch.cat([found[name].flatten() for name in reference])
                    for found in (ours, reference)
                )
            )
            <= 1e-6
        ), chunks


def _widens(op: Op) -> bool:
    """Whether it is the first product of a feed-forward block."""
    if op.phase is not Phase.FORWARD or op.node.target not in (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
    ):
        return False
    inner, outer = op.node.args[-1].meta["val"].shape  # pyright: ignore
    return inner < outer and re.search(r"mlp|intermediate", op.module) is not None


class DenseExperts(nn.Module):
    """Every expert sees every token; what the router does not choose counts for nothing."""

    def __init__(self, num_experts: int = 3, width: int = 8, inner: int = 24) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * inner) / 4)
        self.down = nn.Parameter(torch.randn(num_experts, inner, width) / 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.router(tokens).softmax(-1)
        scores = torch.where(scores >= scores.topk(2, dim=-1).values[:, -1:], scores, 0.0)
        gate, up = torch.bmm(tokens.expand(len(self.up), *tokens.shape), self.up).chunk(2, dim=-1)
        out = torch.bmm(functional.silu(gate) * up, self.down)
        return (out * scores.t().unsqueeze(-1)).sum(0)


@made_of(lambda: {"layers": nn.ModuleList(DenseExperts() for _ in range(2))})
class Mixture(nn.Module):
    """Two residual layers of dense experts, and a loss."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            tokens = tokens + layer(tokens)
        return {"loss": tokens.square().mean()}


def test_dense_experts_run_in_chunks_of_tokens() -> None:
    torch.manual_seed(0)
    model, batch = Mixture().train(), {"tokens": torch.randn(20, 8)}
    step = capture_step(model, batch)
    found = separable_blocks(step.capture).feed_forward.values()
    blocks = [block for block in found if isinstance(block, Region)]
    sizes = [(block.name, block.num_rows) for block in blocks]
    assert sizes == [("layers.0", 20), ("layers.1", 20)]
    in_chunks = chunked(step, "1 recompute, 3 in layers")
    shapes = {
        tuple(op.node.meta["val"].shape)
        for op in in_chunks.graph.ops
        if op.node.target is torch.ops.aten.bmm.default
    }
    assert not any(20 in shape and (24 in shape or 48 in shape) for shape in shapes)
    expected, reference = eager(model, batch)
    assert distance(train(in_chunks, batch), expected) <= 1e-6
    ours = gradients(model)
    assert max(distance(ours[name], reference[name]) for name in reference) <= 1e-6


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_grouped_experts_stay_whole(name: str) -> None:
    """Tokens are sorted by expert: which rows an expert has depends on values."""
    architectures.skip_if_refused(name)
    step = capture_step(*architectures.case(name), StepOptions(outputs="loss"))
    blocks = separable_blocks(step.capture).feed_forward.values()
    assert all(isinstance(block, Refusal) for block in blocks)
    assert {block.block for block in blocks if isinstance(block, Refusal)} == {
        f"model.layers.{i}.mlp.experts" for i in range(2)
    }
    plan = Planner.of(step).plan(1.0)
    for told in (
        str(plan.explain("model.layers.0")),
        str(Plan.from_text(plan.to_text()).explain("grouped_mm_fallback")),
    ):
        assert re.search(
            r"^block that widens model\.layers\.0\.mlp\.experts: not in chunks: \S*grouped_mm\S* \(grouped_mm_fallback\) in "  # noqa: E501
            r"model\.layers\.0\.mlp\.experts multiplies rows group by group, and the rows of a group depend on values$",  # noqa: E501
            told,
            re.MULTILINE,
        )
    assert "widens" not in str(plan.explain("lm_head"))
