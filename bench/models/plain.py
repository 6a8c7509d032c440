"""Models of plain torch: an MLP, and `nn.TransformerEncoder`."""

from __future__ import annotations

from itertools import chain, pairwise

from torch import Tensor, nn

from bench.models import batches
from bench.models.workload import Made, loss_alone, outside_squared_error


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


def mlp(*, layers: int, width: int, rows: int) -> Made:
    """A chain of equal layers."""
    return Made(
        model=MLP(layers, width),
        make_batch=batches.vectors("x", width),
        rows=rows,
        layers=("layers.*",),
        loss=outside_squared_error,
    )


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


def funnels(*, widths: list[int], rows: int, length: int) -> Made:
    """Such layers, over so many values a row."""
    make_batch = batches.drawn(values=batches.normal(length, widths[0]))
    model = Funnels(widths)
    return Made(
        model=model, make_batch=make_batch, rows=rows, layers=("layers.*",), loss=loss_alone
    )


def encoder(*, layers: int, width: int, heads: int, inner: int, rows: int, length: int) -> Made:
    """`nn.TransformerEncoder` with the squared error as its loss."""
    layer = nn.TransformerEncoderLayer(width, heads, inner, batch_first=True)
    # Nested tensors serve inference only, and the default warns where they cannot be used.
    return Made(
        model=nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        make_batch=batches.vectors("src", length, width),
        rows=rows,
        layers=("layers.*",),
        loss=outside_squared_error,
    )
