"""Image models: ResNet, U-Net; DenseNet and HRNet, which branch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models.workload import Step
from bench.unet import UNet as UNet


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


class _DenseLayer(nn.Module):
    """Normalization, ReLU and convolution, 1x1 then 3x3, of all earlier outputs of the block."""

    def __init__(self, in_width: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_width)
        self.conv1 = nn.Conv2d(in_width, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, *features: Tensor) -> Tensor:
        inner = self.conv1(functional.relu(self.norm1(torch.cat(features, 1))))
        return self.conv2(functional.relu(self.norm2(inner)))


class _DenseBlock(nn.Module):
    def __init__(self, in_width: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            _DenseLayer(in_width + index * growth, growth) for index in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """DenseNet (Huang et al., 2017): each layer reads all earlier outputs of its block.

    Between two blocks the image size halves.
    """

    def __init__(self, depths: Sequence[int], growth: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages: list[nn.Module] = []
        for index, depth in enumerate(depths):
            stages.append(_DenseBlock(width, growth, depth))
            width += depth * growth
            if index < len(depths) - 1:
                between = (
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(width, width // 2, 1, bias=False),
                    nn.AvgPool2d(2),
                )
                stages.append(nn.Sequential(*between))
                width //= 2
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Step:
        """Loss and class scores."""
        scores = self.head(functional.relu(self.norm(self.stages(self.stem(images)))).mean((2, 3)))
        return Step(functional.cross_entropy(scores, labels), scores)


class _Exchange(nn.Module):
    """Branches of several sizes: residual blocks in each, then every branch added to every other.

    A branch is resized before it is added.
    """

    def __init__(self, widths: Sequence[int], depth: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*[Residual(width, width) for _ in range(depth)]) for width in widths
        )
        self.paths = nn.ModuleList(
            nn.ModuleList(_path(widths, source, target) for source in range(len(widths)))
            for target in range(len(widths))
        )

    def forward(self, *images: Tensor) -> tuple[Tensor, ...]:
        made = [branch(x) for branch, x in zip(self.branches, images, strict=True)]
        fused = []
        for paths in self.paths:
            terms: Iterator[Tensor] = (path(x) for path, x in zip(paths, made, strict=True))  # pyright: ignore[reportArgumentType]
            total = next(terms)
            for term in terms:
                total = total + term
            fused.append(functional.relu(total))
        return tuple(fused)


def _path(widths: Sequence[int], source: int, target: int) -> nn.Module:
    """A module from the size of one branch to that of another."""
    if source == target:
        return nn.Identity()
    if source > target:
        return nn.Sequential(
            nn.Conv2d(widths[source], widths[target], 1, bias=False),
            nn.BatchNorm2d(widths[target]),
            nn.Upsample(scale_factor=2 ** (source - target), mode="nearest"),
        )
    steps: list[nn.Module] = []
    for step in range(source + 1, target + 1):
        out_width = widths[target] if step == target else widths[source]
        steps += [
            nn.Conv2d(widths[source], out_width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(out_width),
        ]
    return nn.Sequential(*steps)


class HRNet(nn.Module):
    """High-resolution network (Wang et al., 2019) with all its branches throughout.

    A classifier reads all branches.
    """

    def __init__(self, widths: Sequence[int], num_exchanges: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)
        )
        self.begin = nn.ModuleList(
            nn.Conv2d(32, width, 3, 2**index, 1) for index, width in enumerate(widths)
        )
        self.exchanges = nn.ModuleList(_Exchange(widths, depth) for _ in range(num_exchanges))
        self.head = nn.Linear(sum(widths), classes)

    def forward(self, images: Tensor, labels: Tensor) -> Step:
        """Loss and class scores."""
        stem = self.stem(images)
        made: tuple[Tensor, ...] = tuple(begin(stem) for begin in self.begin)
        for exchange in self.exchanges:
            made = exchange(*made)
        scores = self.head(torch.cat([x.mean((2, 3)) for x in made], 1))
        return Step(functional.cross_entropy(scores, labels), scores)
