"""Models of plain torch: an MLP, and `nn.TransformerEncoder`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from bench.models import batches
from bench.models.workload import Workload, outside_squared_error, prepared


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


def mlp(name: str, tiny: bool, device: torch.device) -> Workload:
    """A chain of 24 equal layers."""
    num_layers, width, rows = (4, 32, 256) if tiny else (24, 768, 1024)
    shape = (rows, width)
    return Workload(
        name=name,
        model=prepared(MLP(num_layers, width), device),
        layers=lambda model: list(model.layers),  # pyright: ignore
        loss=outside_squared_error,
        make_batch=partial(
            batches.regression_vectors, shape=shape, name="x", target_shape=shape, device=device
        ),
    )


def encoder(
    name: str,
    tiny: bool,
    device: torch.device,
    *,
    num_layers: int,
    width: int,
    heads: int,
    shape: tuple[int, int],
) -> Workload:
    """`nn.TransformerEncoder` with the squared error as its loss."""
    inner = 4 * width
    if tiny:
        num_layers, width, heads, inner, shape = 2, 32, 2, 64, (2, 16)
    layer = nn.TransformerEncoderLayer(width, heads, inner, batch_first=True)
    # Nested tensors serve inference only, and the default warns where they cannot be used.
    model = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
    full_shape = (*shape, width)
    return Workload(
        name=name,
        model=prepared(model, device),
        layers=lambda module: list(module.layers),  # pyright: ignore
        loss=outside_squared_error,
        make_batch=partial(
            batches.regression_vectors,
            shape=full_shape,
            name="src",
            target_shape=full_shape,
            device=device,
        ),
    )
