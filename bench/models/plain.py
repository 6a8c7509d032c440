"""Models of plain torch: MLPs, torch's transformers, and one that denoises videos."""

from __future__ import annotations

from itertools import chain, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.models.workload import Step


class MLP(nn.Module):
    """A chain of equal layers, Linear then GELU: the simplest model to recompute."""

    def __init__(self, num_layers: int, width: int) -> None:
        """All layers keep the width."""
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's output, of the input's shape."""
        for layer in self.layers:
            x = layer(x)
        return x


class Funnels(nn.Module):
    """Linear layers of several widths, GELU after each; returns the mean square alone."""

    def __init__(self, widths: list[int]) -> None:
        """The widths before the first layer, between two, and after the last."""
        super().__init__()
        pairs = [(nn.Linear(*each), nn.GELU()) for each in pairwise(widths)]
        self.layers = nn.Sequential(*chain.from_iterable(pairs))

    def forward(self, values: Tensor) -> Tensor:
        """The loss."""
        return self.layers(values).square().mean()


def encoder(layers: int, width: int, heads: int, inner: int) -> nn.Module:
    """`nn.TransformerEncoder`."""
    layer = nn.TransformerEncoderLayer(width, heads, inner, batch_first=True)
    # Nested tensors serve inference only, and the default warns where they cannot be used.
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Transformer(nn.Module):
    """`nn.Transformer` that learns to return its target."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.model = nn.Transformer(width, 8, layers, layers, 4 * width, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, src: Tensor, tgt: Tensor) -> Step:  # noqa: D102
        prediction = self.head(self.model(src, tgt))
        return Step(functional.mse_loss(prediction, tgt), prediction)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.query_norm, self.key_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        query, key = self.query_norm(self.query(x)), self.key_norm(self.key(context))
        parts = (query, key, self.value(context))
        split = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        mixed = functional.scaled_dot_product_attention(*split)
        return self.out(mixed.transpose(1, 2).flatten(2))


class _VideoLayer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.own, self.cross = _Attention(width, heads), _Attention(width, heads)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.table = nn.Parameter(torch.zeros(6, width))

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, *others = (time + self.table).unsqueeze(2).unbind(1)
        normed = self.norms[0](x) * (1 + scale) + shift
        x = x + gate * self.own(normed, normed)
        x = x + self.cross(self.norms[1](x), text)
        shift, scale, gate = others
        normed = self.norms[2](x) * (1 + scale) + shift
        return x + gate * self.down(functional.gelu(self.up(normed), approximate="tanh"))


class VideoTransformer(nn.Module):
    """A transformer over the patches of a video that attends to a text and knows a time."""

    is_checkpointed = False

    def __init__(self, layers: int, width: int, heads: int, inner: int, patch: int) -> None:
        """Patches have so many values."""
        super().__init__()
        self.first, self.last = nn.Linear(patch, width), nn.Linear(width, patch)
        self.layers = nn.ModuleList(_VideoLayer(width, heads, inner) for _ in range(layers))

    def gradient_checkpointing_enable(self, _: object = None) -> None:
        """Each layer is checkpointed from then on."""
        self.is_checkpointed = True

    def forward(self, patches: Tensor, noise: Tensor, text: Tensor, time: Tensor) -> Step:
        """The mean squared error of the noise that it predicts, and that."""
        x = self.first(patches)
        for layer in self.layers:
            arguments = (x, text, time)
            x = (
                checkpoint(layer, *arguments, use_reentrant=False)
                if self.is_checkpointed
                else layer(*arguments)
            )
        prediction = self.last(x)
        return Step(functional.mse_loss(prediction, noise), prediction)
