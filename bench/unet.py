"""A plain U-Net (Ronneberger et al., 2015): convolutions down, transposed ones up, skips between.

As published, except for padding, which keeps the size, and batch normalization after each
convolution, as is common since. The results of each level on the way down are read again on the way
up. So no single value cuts the step in two. Such a model is hard for checkpoints around layers and
for chains of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DoubleConvolution(nn.Sequential):
    """Twice: 3x3 convolution, batch normalization, ReLU in place."""

    def __init__(self, in_width: int, out_width: int) -> None:
        """Widths in channels; the size stays."""
        super().__init__(
            nn.Conv2d(in_width, out_width, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_width),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_width, out_width, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_width),
            nn.ReLU(inplace=True),
        )


class Up(nn.Module):
    """One level up: doubles the size, joins the skip, and convolves twice."""

    def __init__(self, in_width: int) -> None:
        """Halves the width."""
        super().__init__()
        self.grow = nn.ConvTranspose2d(in_width, in_width // 2, 2, stride=2)
        self.convolve = DoubleConvolution(in_width, in_width // 2)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """The joined level, of the skip's shape; `x` has twice its width and half its size."""
        return self.convolve(torch.cat([skip, self.grow(x)], dim=1))


class UNet(nn.Module):
    """Scores for each class and pixel; the loss is the caller's."""

    def __init__(self, *, num_levels: int, base_width: int, classes: int) -> None:
        """The size halves and the width doubles `num_levels` times, and back.

        Sizes must be multiples of 2 ** num_levels.
        """
        super().__init__()
        widths = [base_width * 2**level for level in range(num_levels + 1)]
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(
            DoubleConvolution(in_width, width)
            for in_width, width in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(Up(width) for width in reversed(widths[1:]))
        self.head = nn.Conv2d(base_width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (batch, classes, height, width)."""
        skips: list[Tensor] = []
        for level, convolve in enumerate(self.down):
            x = convolve(self.pool(x) if level else x)
            skips.append(x)
        skips.pop()
        for up in self.up:
            x = up(x, skips.pop())
        return self.head(x)


def example() -> tuple[UNet, Tensor]:
    """The U-Net of the tables and a sample, as `rockmate plan bench.unet:example` takes them."""
    return UNet(num_levels=4, base_width=32, classes=8).train(), torch.zeros(2, 3, 128, 128)
