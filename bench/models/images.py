"""Image models: ViT, convolutional classifiers in stages, ResNet, U-Net."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from bench.models import batches
from bench.models.workload import TARGET, Workload, outside_cross_entropy, own_loss, prepared
from bench.unet import UNet


def _image_workload(
    name: str,
    model: nn.Module,
    layers: Callable[[Any], list[nn.Module]],
    device: torch.device,
    *,
    batch: int,
    pixels: int,
    classes: int,
) -> Workload:
    """A Hugging Face classifier, which computes the loss itself."""
    names = ("pixel_values", "labels")
    return Workload(
        name=name,
        model=prepared(model, device),
        layers=layers,
        loss=own_loss,
        make_batch=partial(
            batches.labelled_images,
            batch=batch,
            pixels=pixels,
            classes=classes,
            names=names,
            device=device,
        ),
    )


def vit(name: str, tiny: bool, device: torch.device, *, width: int, heads: int) -> Workload:
    """ViT with patches of 16 pixels on images of 224."""
    num_layers, inner, batch, pixels, patch, classes = 12, 4 * width, 4, 224, 16, 1000
    if tiny:
        num_layers, width, heads, inner, batch, pixels, patch, classes = 2, 32, 2, 64, 2, 32, 8, 10
    config = transformers.ViTConfig(
        num_hidden_layers=num_layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=inner,
        image_size=pixels,
        patch_size=patch,
        num_labels=classes,  # pyright: ignore[reportCallIssue]
        problem_type="single_label_classification",
    )
    model = transformers.ViTForImageClassification(config)
    return _image_workload(
        name, model, _vit_layers, device, batch=batch, pixels=pixels, classes=classes
    )


def _vit_layers(model: nn.Module) -> list[nn.Module]:
    # By class, because the attribute that holds the layers differs between library releases.
    return [module for module in model.modules() if type(module).__name__ == "ViTLayer"]


def staged(
    name: str,
    tiny: bool,
    device: torch.device,
    *,
    kind: str,
    widths: list[int],
    depths: list[int],
    batch: int = 8,
    pixels: int = 192,
    classes: int = 100,
    small: Mapping[str, Any],
    **configuration: Any,
) -> Workload:
    """A convolutional classifier in stages.

    Args:
        name: Of the workload.
        tiny: Build the variant for tests.
        device: Where the weights are.
        kind: The library's prefix of its classes.
        widths: Channels of each stage.
        depths: Layers of each stage.
        batch: Images in a batch.
        pixels: Height and width of an image.
        classes: Number of classes.
        small: Configuration values of the tiny variant.
        **configuration: Further configuration values.
    """
    if tiny:
        widths, batch, pixels, classes = [16, 32], 2, 32, 10
        configuration |= small
        depths = configuration.pop("depths")
    config = getattr(transformers, f"{kind}Config")(
        hidden_sizes=widths,
        depths=depths,
        num_labels=classes,
        problem_type="single_label_classification",
        **configuration,
    )
    model = getattr(transformers, f"{kind}ForImageClassification")(config)
    layers = partial(_stage_layers, encoder=f"{kind.lower()}.encoder")
    return _image_workload(name, model, layers, device, batch=batch, pixels=pixels, classes=classes)


def _stage_layers(model: nn.Module, *, encoder: str) -> list[nn.Module]:
    stages: Any = model.get_submodule(encoder).stages
    return [layer for stage in stages for layer in stage.layers]


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


def resnet(
    name: str, tiny: bool, device: torch.device, *, depths: tuple[int, ...], batch: int, pixels: int
) -> Workload:
    """ResNet of bottlenecks, `depths` in each stage."""
    base_width, classes = 64, 1000
    if tiny:
        depths, base_width, classes, batch, pixels = (1, 2), 8, 10, 2, 32
    return Workload(
        name=name,
        model=prepared(ResNet(depths=depths, base_width=base_width, classes=classes), device),
        layers=lambda model: list(model.blocks),  # pyright: ignore
        loss=outside_cross_entropy,
        make_batch=partial(
            batches.labelled_images,
            batch=batch,
            pixels=pixels,
            classes=classes,
            names=("x", TARGET),
            device=device,
        ),
    )


def unet(
    name: str, tiny: bool, device: torch.device, *, base_width: int, batch: int, pixels: int
) -> Workload:
    """U-Net of four levels that assigns each pixel one of eight classes."""
    num_levels, classes = 4, 8
    if tiny:
        num_levels, base_width, batch, pixels = 2, 4, 2, 16
    return Workload(
        name=name,
        model=prepared(UNet(num_levels=num_levels, base_width=base_width, classes=classes), device),
        layers=lambda model: [*model.down, *model.up],  # pyright: ignore
        loss=outside_cross_entropy,
        make_batch=partial(
            batches.segmented_images, batch=batch, pixels=pixels, classes=classes, device=device
        ),
    )
