"""In the shape of torchvision's detection references: Faster R-CNN, lists of targets."""

from __future__ import annotations

from typing import Any

import torch
from torchvision.models import detection  # pyright: ignore[reportMissingImports]

torch.manual_seed(0)
model: Any = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
    weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=96
)
optimizer = torch.optim.SGD(
    [each for each in model.parameters() if each.requires_grad], lr=0.005, momentum=0.9
)


def batch(number: int) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Pictures of several sizes, with boxes."""
    generator = torch.Generator().manual_seed(number)
    pictures = [torch.rand(3, 64, 64 + 16 * at, generator=generator) for at in range(2)]
    boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0], [10.0, 20.0, 50.0, 60.0]])
    return pictures, [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in pictures]


model.train()
for step in range(24):
    pictures, targets = batch(step)
    loss: Any = sum(model(pictures, targets).values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
