"""Diffusion models: U-Nets with attention to text, a transformer of two streams.

Needs diffusers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from bench.models.workload import Step

_ADDED = ("text_embeds", "time_ids")


class _Denoiser(nn.Module):
    """A diffusion model that predicts the noise; `conditions` are its further arguments."""

    def __init__(self, model: nn.Module, sample_name: str = "sample") -> None:
        super().__init__()
        self.model, self.sample_name = model, sample_name

    def forward(self, sample: Tensor, noise: Tensor, **conditions: Tensor) -> Step:
        arguments: dict[str, Any] = {k: v for k, v in conditions.items() if k not in _ADDED}
        if len(arguments) < len(conditions):
            arguments["added_cond_kwargs"] = {key: conditions[key] for key in _ADDED}
        arguments[self.sample_name] = sample
        (prediction,) = self.model(return_dict=False, **arguments)
        return Step(functional.mse_loss(prediction, noise), prediction)


def denoiser(name: str, sample_name: str = "sample", **fields: Any) -> nn.Module:
    """Such a model of a class of diffusers, with the fields of its configuration."""
    try:
        import diffusers
    except ImportError as error:
        msg = f"{name} is a model of the package diffusers: pip install diffusers"
        raise RuntimeError(msg) from error
    return _Denoiser(getattr(diffusers, name)(**fields), sample_name)
