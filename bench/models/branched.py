"""The form of a branched model: one whose step is not a chain of blocks.

Each builder gives a model that computes its loss itself, and the paths of the modules around which
one would put checkpoints by hand: its blocks, and its stages if it has some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Step(NamedTuple):
    """The output of a model that is no library's: the loss and the prediction it came from."""

    loss: Tensor
    prediction: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchedModel:
    """A model, its batches and its natural modules.

    Attributes:
        model: The module. Its output has a `loss`.
        make_batch: Keyword arguments of one call, drawn from a generator, on the CPU.
        blocks: Paths of its blocks. A `*` stands for any one name.
        stages: Paths of its stages, each of several blocks; empty if it has none.
    """

    model: nn.Module
    make_batch: Callable[[torch.Generator], dict[str, Tensor]]
    blocks: tuple[str, ...]
    stages: tuple[str, ...] = ()


def modules_at(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """The submodules whose paths match one of the patterns, in the model's order.

    Raises:
        ValueError: A pattern matches no submodule.
    """
    found = [
        [module for path, module in model.named_modules() if _matches(path, pattern)]
        for pattern in patterns
    ]
    for pattern, modules in zip(patterns, found, strict=True):
        if not modules:
            msg = (
                f"no submodule of {type(model).__name__} has a path like {pattern!r}; "
                "the library may have moved it"
            )
            raise ValueError(msg)
    wanted = {module for modules in found for module in modules}
    return [module for module in model.modules() if module in wanted]


def _matches(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return bool(path) and len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


def random_tokens(generator: torch.Generator, vocabulary: int, *shape: int) -> Tensor:
    """Random tokens; 0 to 2 are kept for special ones."""
    return torch.randint(3, vocabulary, shape, generator=generator)
