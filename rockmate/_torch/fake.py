"""Fake tensors and symbolic sizes. PyTorch documents both and exports neither."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

__all__ = [
    "ConstantSource",
    "DimDynamic",
    "FakeTensor",
    "FakeTensorMode",
    "ShapeEnv",
    "is_fake",
    "mode_of",
    "move_to",
]


def mode_of(fake: Any) -> FakeTensorMode:
    """The mode in which ops on a fake tensor give fake tensors of the same kind."""
    return fake.fake_mode


def move_to(fake: FakeTensor, device: torch.device) -> None:
    """Changes the device that a fake tensor reports, in place. `Tensor.to` would make another."""
    fake.fake_device = device
