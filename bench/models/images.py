"""Image models: ResNet, U-Net."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models import batches
from bench.models.workload import Made, outside_cross_entropy
from bench.unet import UNet


class Bottleneck(nn.Module):
    """The residual block of ResNet-50: convolutions of 1x1, 3x3 and 1x1.

    The 3x3 convolution has the stride. ReLU and addition are in place.
    """

    expansion = 4

    def __init__(self, in_width: int, inner: int, stride: int) -> None:
        """Widths in channels; a block that changes width or size projects its shortcut."""
        super().__init__()
        out_width = inner * self.expansion
        self.conv1 = nn.Conv2d(in_width, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out_width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_width != out_width:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_width, out_width, 1, stride, bias=False), nn.BatchNorm2d(out_width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, (batch, 4 * inner, height / stride, width / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += shortcut
        return self.relu(out)


class Residual(nn.Module):
    """Two 3x3 convolutions with batch normalization around a shortcut (He et al., 2015)."""

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        """Widths in channels; a block that changes width or size projects its shortcut."""
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.skip = (
            nn.Conv2d(inner, outer, 1, stride) if (stride, inner) != (1, outer) else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, (batch, outer, height / stride, width / stride)."""
        return functional.relu(self.convolutions(x) + self.skip(x))


class ResNet(nn.Module):
    """ResNet of bottlenecks (He et al., 2015), laid out as in torchvision; the loss is outside."""

    def __init__(self, *, depths: Sequence[int], base_width: int, classes: int) -> None:
        """`depths` is the number of bottlenecks a stage; each stage doubles the inner width."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, base_width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(base_width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        in_width = base_width
        for stage, depth in enumerate(depths):
            inner = base_width * 2**stage
            for index in range(depth):
                blocks.append(Bottleneck(in_width, inner, 2 if stage and not index else 1))
                in_width = inner * Bottleneck.expansion
        self.blocks = nn.ModuleList(blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(in_width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (batch, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for block in self.blocks:
            x = block(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet(*, depths: Sequence[int], base_width: int, classes: int, rows: int, pixels: int) -> Made:
    """ResNet of bottlenecks, `depths` in each stage."""
    return Made(
        model=ResNet(depths=depths, base_width=base_width, classes=classes),
        make_batch=batches.images(pixels, classes, ("x", batches.TARGET)),
        rows=rows,
        layers=("blocks.*",),
        loss=outside_cross_entropy,
    )


def unet(*, num_levels: int, base_width: int, rows: int, pixels: int) -> Made:
    """U-Net that assigns each pixel one of eight classes."""
    classes = 8
    values = {
        "x": batches.normal(3, pixels, pixels),
        batches.TARGET: batches.classes(classes, pixels, pixels),
    }
    return Made(
        model=UNet(num_levels=num_levels, base_width=base_width, classes=classes),
        make_batch=batches.drawn(**values),
        rows=rows,
        layers=("down.*", "up.*"),
        loss=outside_cross_entropy,
    )
