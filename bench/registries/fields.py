"""Models of packages of other fields, from a table of expressions, with a batch and a loss.

An entry of fields.toml is a list of two expressions in Python: the model, and what it is called
with, a tuple of arguments or a dict of keywords. They know the names of the modules in `import`,
and those of this file.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rockmate.state.opened_object import tensors_within

TABLE: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""Package -> its field, the modules whose names are known, and its models."""


class Output(NamedTuple):
    """What a wrapped model returns."""

    loss: Tensor


class WithLoss(nn.Module):
    """A model with a loss: the mean square of all that it returns and that has a gradient."""

    def __init__(self, model: nn.Module, *entry: str) -> None:
        super().__init__()
        self.model, self.entry = model, entry

    def forward(self, inputs: Any = (), **named: Any) -> Output:  # noqa: D102
        if isinstance(inputs, dict):
            inputs, named = (), inputs
        result = self.model(*inputs, **named)
        losses = [_mean_square(each) for each in tensors_within(result) if each.requires_grad]
        return Output(torch.stack(losses).sum())


def _mean_square(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.square().mean()


def builder(package: str, name: str) -> Callable[[], nn.Module]:
    """Makes a model of the table."""
    return partial(_build, package, name)


def _build(package: str, name: str) -> nn.Module:
    made = eval(TABLE[package]["models"][name][0], _names_of(package))
    return WithLoss(made, package, name).train()


@cache
def _names_of(package: str) -> dict[str, Any]:
    torch.serialization.add_safe_globals([slice])  # in the tables of e3nn 0.4
    entry = TABLE[package]
    words = set(re.findall(r"\w+", str(entry["models"])))
    known = {"torch": torch, "nn": nn} | _HELPERS
    for module in map(importlib.import_module, entry["import"]):
        known |= {word: getattr(module, word) for word in words if hasattr(module, word)}
    return known


def make_batch(model: Any, seed: int) -> dict[str, Any]:
    """What a model is called with; the same for the same seed."""
    package, name = model.entry
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        known = _names_of(package) | {"seed": seed}
        return {"inputs": eval(TABLE[package]["models"][name][1], known)}


# --- names of the table -----------------------------------------------------------------------


def ints(high: int, *shape: int) -> Tensor:
    """Numbers below `high`."""
    return torch.randint(high, shape)


_HELPERS = {"randn": torch.randn, "rand": torch.rand, "ints": ints}
