"""Image models: ViT, convolutional classifiers in stages, ResNet, U-Net."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench.models import batches
from bench.models.hf import hf, usual
from bench.models.workload import TARGET, Made, outside_cross_entropy
from bench.unet import UNet

_OF_A_CLASS = {"problem_type": "single_label_classification"}


def vit(tiny: bool, *, width: int, heads: int) -> Made:
    """ViT with patches of 16 pixels on images of 224."""
    layers, inner, batch, pixels, patch, classes = 12, 4 * width, 4, 224, 16, 1000
    if tiny:
        layers, width, heads, inner, batch, pixels, patch, classes = 2, 32, 2, 64, 2, 32, 8, 10
    model = hf(
        "ViTForImageClassification", **usual(layers, width, heads, inner), image_size=pixels,
        patch_size=patch, num_labels=classes, **_OF_A_CLASS,
    )  # fmt: skip
    # The attribute that holds the layers differs between library releases.
    layer = next(path for path, m in model.named_modules() if type(m).__name__ == "ViTLayer")
    return Made(
        model=model,
        make_batch=batches.images(batch, pixels, classes),
        layers=(f"{layer.rpartition('.')[0]}.*",),
    )


def staged(
    tiny: bool,
    *,
    kind: str,
    widths: list[int],
    depths: list[int],
    batch: int = 8,
    pixels: int = 192,
    small: Mapping[str, Any],
    **fields: Any,
) -> Made:
    """A convolutional classifier in stages.

    Args:
        tiny: Build the variant for tests.
        kind: The library's prefix of its classes.
        widths: Channels of each stage.
        depths: Layers of each stage.
        batch: Images in a batch.
        pixels: Height and width of an image.
        small: Configuration values of the tiny variant.
        **fields: Further configuration values.
    """
    classes = 100
    if tiny:
        widths, batch, pixels, classes = [16, 32], 2, 32, 10
        fields |= small
        depths = fields.pop("depths")
    model = hf(
        f"{kind}ForImageClassification", hidden_sizes=widths, depths=depths, num_labels=classes,
        **_OF_A_CLASS, **fields,
    )  # fmt: skip
    return Made(
        model=model,
        make_batch=batches.images(batch, pixels, classes),
        layers=(f"{kind.lower()}.encoder.stages.*.layers.*",),
    )


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


class ResNet(nn.Module):
    """ResNet of bottlenecks (He et al., 2015), laid out as in torchvision; the loss is outside."""

    def __init__(self, *, depths: tuple[int, ...], base_width: int, classes: int) -> None:
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


def resnet(tiny: bool, *, depths: tuple[int, ...], batch: int, pixels: int) -> Made:
    """ResNet of bottlenecks, `depths` in each stage."""
    base_width, classes = 64, 1000
    if tiny:
        depths, base_width, classes, batch, pixels = (1, 2), 8, 10, 2, 32
    return Made(
        model=ResNet(depths=depths, base_width=base_width, classes=classes),
        make_batch=batches.images(batch, pixels, classes, ("x", TARGET)),
        layers=("blocks.*",),
        loss=outside_cross_entropy,
    )


def unet(tiny: bool, *, base_width: int, batch: int, pixels: int) -> Made:
    """U-Net of four levels that assigns each pixel one of eight classes."""
    num_levels, classes = 4, 8
    if tiny:
        num_levels, base_width, batch, pixels = 2, 4, 2, 16
    segmented = {"x": batches.normal(batch, 3, pixels, pixels)}
    segmented[TARGET] = batches.classes(classes, batch, pixels, pixels)
    return Made(
        model=UNet(num_levels=num_levels, base_width=base_width, classes=classes),
        make_batch=batches.drawn(**segmented),
        layers=("down.*", "up.*"),
        loss=outside_cross_entropy,
    )
