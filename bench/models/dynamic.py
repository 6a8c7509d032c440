"""Models without one graph: their forwards depend on chance, on data, or on the shape of an input.

Each returns its loss. Random numbers are PyTorch's, so a seed repeats a step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models.images import Residual
from bench.models.registry import build as build_static
from bench.models.registry import built, makers
from bench.models.workload import Workload


class Loss(nn.Module):
    """A model of transformers, or of the registry, as its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:  # noqa: D102
        outputs = self.model(**batch)
        return outputs[0] if isinstance(outputs, tuple) else outputs.loss


# --- depth that depends on the data -----------------------------------------------------------


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each.unflatten(-1, (4, -1)).transpose(1, 2)
            for each in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Halting(nn.Module):
    """A transformer that stops at the depth where its activations have grown enough."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        x = functional.unfold(images, 4, stride=4).transpose(1, 2)
        x = functional.pad(x, (0, self.head.in_features - x.shape[-1]))
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index >= len(self.layers) // 2 and x[:, 0].std() > 1.0 + 0.02 * index:
                break
        return functional.cross_entropy(self.head(x.mean(1)), labels)


# --- a detector -------------------------------------------------------------------------------


class Detector(nn.Module):
    """Two stages, as Mask R-CNN: proposals by score, then classes and masks of what they cut out.

    How many proposals there are depends on the scores; boxes are cells of the feature map.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (width, width, 2 * width, 2 * width, 4 * width, 4 * width)
        self.stem = nn.Conv2d(3, width, 7, 2, 3)
        self.backbone = nn.ModuleList(
            Residual(widths[max(0, i - 1)], each, 2 if i % 2 else 1)
            for i, each in enumerate(widths)
        )
        self.proposals = nn.Sequential(nn.Conv2d(4 * width, 64, 3, 1, 1), nn.ReLU())
        self.score = nn.Conv2d(64, 1, 1)
        self.masks = nn.ModuleList(Residual(4 * width, 4 * width, 1) for _ in range(2))
        self.mask = nn.Conv2d(4 * width, 1, 1)
        self.classes = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        x = functional.relu(self.stem(images))
        for stage in self.backbone:
            x = stage(x)
        scores = self.score(self.proposals(x))
        losses = [functional.softplus(scores).mean()]
        for image, label in enumerate(labels):
            top = scores[image, 0].flatten()
            chosen = (top > top.mean() + top.std()).nonzero()[:, 0][:12].tolist()
            if not chosen:
                continue
            columns = x.shape[-1]
            padded = functional.pad(x[image], (3, 3, 3, 3))
            cut = torch.stack([padded[:, c // columns :, c % columns :][:, :7, :7] for c in chosen])
            losses.append(
                functional.cross_entropy(self.classes(cut.mean((2, 3))), label.expand(len(chosen)))
            )
            cut = functional.interpolate(cut, scale_factor=2.0)
            for layer in self.masks:
                cut = layer(cut)
            losses.append(self.mask(cut).sigmoid().mean())
        return torch.stack(losses).mean()


# --- trees ------------------------------------------------------------------------------------


class _Cell(nn.Module):
    """A binary TreeLSTM cell over many rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Sequential(nn.Linear(2 * width, 5 * width))

    def forward(
        self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        gates = self.gates(torch.cat([left[0], right[0]], -1))
        update, first, second, output, value = gates.chunk(5, -1)
        cell = update.sigmoid() * value.tanh()
        cell = cell + first.sigmoid() * left[1] + second.sigmoid() * right[1]
        return output.sigmoid() * cell.tanh(), cell


class TreeLSTM(nn.Module):
    """Composes random trees: another one at each call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.leaf = nn.Sequential(nn.Linear(width, 2 * width))
        self.cell = _Cell(width)
        self.head = nn.Linear(width, 10)

    def forward(self, leaves: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        states = [tuple(self.leaf(leaf).chunk(2, -1)) for leaf in leaves]
        while len(states) > 1:
            index = int(torch.randint(len(states) - 1, ()))
            states[index : index + 2] = [self.cell(states[index], states[index + 1])]
        return functional.cross_entropy(self.head(states[0][0]), labels)


# --- random skips -----------------------------------------------------------------------------


class RandomUNet(nn.Module):
    """A U-Net whose skip connections are left out by chance."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inlet = nn.Conv2d(3, width, 3, 1, 1)
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            Residual(one, other, 2)
            for one, other in zip([width, *widths[:-1]], widths, strict=True)
        )
        self.middle = Residual(4 * width, 4 * width, 1)
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(other, one, 2, 2), Residual(one, one, 1))
            for one, other in zip([width, *widths[:-1]], widths, strict=True)
        )
        self.out = nn.Conv2d(width, 10, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:  # noqa: D102
        x = self.inlet(images)
        kept = []
        for layer in self.down:
            kept.append(x)
            x = layer(x)
        x = self.middle(x)
        for layer in reversed(self.up):
            x = layer(x)
            skip = kept.pop()
            if torch.rand(()) < 0.5:
                x = x + skip
        return functional.cross_entropy(self.out(x).mean((2, 3)), labels)


# --- by name ---------------------------------------------------------------------------------

CONTROLS = ("gpt2-deep", "resnet50")
"""Models that a plan serves as well."""
_MAKERS = makers("dynamic")
NAMES = (*_MAKERS, *CONTROLS)


def build(name: str, *, tiny: bool = False) -> Workload:
    """A model in train mode, with fixed parameters: `model(**batch)` is its loss.

    Args:
        name: of `NAMES`.
        tiny: a step of milliseconds, for tests.
    """
    if name in CONTROLS:
        workload = build_static(name, tiny=tiny).with_loss_inside()
        return replace(workload, model=Loss(workload.model).train())
    return built(name, _MAKERS[name], tiny=tiny)
