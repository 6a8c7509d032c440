"""Loss blocks and feed-forward blocks of Hugging Face architectures in chunks."""

from __future__ import annotations

import re

import architectures
import pytest
import torch
from test_rockmate_chunking import chunked, distance, eager, gradients, train

from rockmate.chunking import Chunks
from rockmate.graph import Op, Phase
from rockmate.step import capture_step


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma2", "mistral", "opt", "bert", "t5", "whisper"])
def test_loss_blocks_of_architectures(name: str) -> None:
    batch = architectures.ARCHITECTURES[name].make_batch(0)
    step = capture_step(architectures.make(name), batch, outputs="loss")
    for chunks in ("3 recompute", "3 at_once"):
        graph = chunked(step, chunks).graph
        rows = [op for op in graph.ops if op.node.target is torch.ops.aten._log_softmax.default]
        assert len(rows) == Chunks.parse(chunks).number


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_feed_forward_blocks(name: str) -> None:
    """Dropout and all: the masks are drawn as a whole, in eager's order."""
    model, batch = architectures.make(name), architectures.ARCHITECTURES[name].make_batch(0)
    step = capture_step(model, batch, outputs="loss")
    inner = {op.node.meta["val"].shape[0] for op in chunked(step, "1 recompute, 3 in layers").graph.ops if _widens(op)}
    assert inner == {8}  # of 2 x 12 rows
    torch.manual_seed(3)
    expected, reference = eager(model, batch, scale=3.0)
    for chunks in ("1 recompute, 3 in layers", "2 at_once, 5 in layers"):
        torch.manual_seed(3)
        assert distance(train(chunked(step, chunks), batch, scale=3.0), expected) <= 1e-6
        ours = gradients(model)  # side by side, since that of a key's bias is zero but for rounding
        assert distance(*(torch.cat([found[name].flatten() for name in reference]) for found in (ours, reference))) <= 1e-6, chunks


def _widens(op: Op) -> bool:
    """Whether it is the first product of a feed-forward block."""
    if op.phase is not Phase.FORWARD or op.node.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return False
    inner, outer = op.node.args[-1].meta["val"].shape  # pyright: ignore
    return inner < outer and re.search(r"mlp|intermediate", op.module) is not None
