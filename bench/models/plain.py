"""Models of plain torch: an MLP, and `nn.TransformerEncoder`."""

from __future__ import annotations

from torch import Tensor, nn

from bench.models import batches
from bench.models.workload import Made, outside_squared_error


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


def mlp(tiny: bool, *, layers: int = 24, width: int = 768, rows: int = 1024) -> Made:
    """A chain of equal layers."""
    if tiny:
        layers, width, rows = 4, 32, 256
    return Made(
        model=MLP(layers, width),
        make_batch=batches.vectors("x", (rows, width)),
        layers=("layers.*",),
        loss=outside_squared_error,
    )


def encoder(tiny: bool, *, layers: int, width: int, heads: int, shape: tuple[int, int]) -> Made:
    """`nn.TransformerEncoder` with the squared error as its loss."""
    inner = 4 * width
    if tiny:
        layers, width, heads, inner, shape = 2, 32, 2, 64, (2, 16)
    layer = nn.TransformerEncoderLayer(width, heads, inner, batch_first=True)
    # Nested tensors serve inference only, and the default warns where they cannot be used.
    return Made(
        model=nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        make_batch=batches.vectors("src", (*shape, width)),
        layers=("layers.*",),
        loss=outside_squared_error,
    )
