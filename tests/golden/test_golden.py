"""Graph, schedule and emitted code of three tiny models, as text.

A change of a pass shows in a diff.

`pytest tests/golden --update-golden` rewrites the texts. Costs are estimated, so they depend on
nothing but the code and the version of PyTorch, whose captured graphs differ between releases.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from rockmate import Planner

FOLDER = Path(__file__).parent
VERSION = ".".join(torch.__version__.split(".")[:2])


class Block(nn.Module):
    """One layer of a decoder with tied embeddings and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.norm, self.last = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention, self.output = nn.Linear(16, 48), nn.Linear(16, 16)
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        parts = self.attention(self.norm(x)).unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(2, 3)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        x = x + self.narrow(functional.gelu(self.wide(self.last(x))))
        scores = x @ self.tokens.weight.T
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(64, 1)), torch.zeros(32, 16)


def decoder() -> tuple[nn.Module, torch.Tensor]:
    return Block(), torch.zeros(2, 8, dtype=torch.int64)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 3 * 3, 2)), torch.zeros(4, 3, 8, 8)


MODELS = {"perceptron": perceptron, "decoder": decoder, "convolutions": convolutions}


def text_of(name: str) -> str:
    """All that planning and emission make of a model, at its smallest peak."""
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    planner = Planner(model, sample, machine="cpu-avx2")
    call = planner.planned_call(planner.minimum_peak_bytes)
    plan = call.plan
    schedule = "\n".join(json.loads(plan.to_text())["schedule"])
    parts = {
        "graph": str(plan.graph),
        "schedule": schedule,
        "peak": f"{plan.predicted_peak_bytes} of {plan.baseline_peak_bytes} bytes",
        "forward": call.program.forward.code.strip(),
        "backward": call.program.backward.code.strip(),
    }
    body = "\n\n".join(f"=== {title}\n{text}" for title, text in parts.items())
    return f"torch {VERSION}\n\n{body}\n"


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_changes_no_text_unnoticed(name: str, request: pytest.FixtureRequest) -> None:
    path = FOLDER / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text_of(name), encoding="utf-8")
    expected = path.read_text(encoding="utf-8")
    if expected.split("\n")[0] != f"torch {VERSION}":
        pytest.skip(f"the text is of {expected.splitlines()[0]}, this is torch {VERSION}")
    assert text_of(name) == expected
