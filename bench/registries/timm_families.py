"""One small model of each family of timm, with its loss; timm is an optional package."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.registries.fields import Output

_SMALL = ("femto", "atto", "pico", "nano", "tiny", "xxs", "xs", "small", "18", "_s")
_SIDES = (64, 224, 256)
_NUM_CLASSES = 10


def names() -> list[str]:
    """The smallest model of each family, as far as names tell."""
    timm: Any = importlib.import_module("timm")
    families = [timm.list_models(module=module) for module in timm.list_modules()]
    return [min(family, key=_rank) for family in families if family]


def _rank(name: str) -> tuple[int, str]:
    return next((i for i, word in enumerate(_SMALL) if word in name), len(_SMALL)), name


class _WithLoss(nn.Module):
    """A classifier with the loss that its training script would compute."""

    def __init__(self, model: nn.Module, side: int) -> None:
        super().__init__()
        self.model, self.side = model, side

    def forward(self, images: Tensor, labels: Tensor) -> Output:
        return Output(functional.cross_entropy(self.model(images), labels))


def builders(name: str) -> list[Callable[[], nn.Module]]:
    """The model for small images, and for the size that it was made for."""
    return [partial(_build, name, side) for side in _SIDES]


def _build(name: str, side: int) -> nn.Module:
    timm: Any = importlib.import_module("timm")
    return _WithLoss(timm.create_model(name, num_classes=_NUM_CLASSES), side).train()


def make_batch(model: Any, seed: int) -> dict[str, Tensor]:
    """Two images and their classes; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(2, 3, model.side, model.side, generator=generator)
    return {"images": images, "labels": torch.randint(_NUM_CLASSES, (2,), generator=generator)}
