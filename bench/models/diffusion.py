"""Diffusion models: a U-Net with attention to text, a transformer of two streams.

Needs diffusers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models.batches import classes, drawn, normal
from bench.models.workload import Made, Step


class _Denoiser(nn.Module):
    """A diffusion model that predicts the noise; `conditions` are its further arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: Tensor, noise: Tensor, **conditions: Tensor) -> Step:
        (prediction,) = self.model(sample, return_dict=False, **conditions)
        return Step(functional.mse_loss(prediction, noise), prediction)


def _diffusers(name: str) -> Any:
    try:
        import diffusers
    except ImportError as error:
        msg = f"{name} is a model of the package diffusers: pip install diffusers"
        raise RuntimeError(msg) from error
    return getattr(diffusers, name)


def conditional_unet(tiny: bool) -> Made:
    """The U-Net of latent diffusion, with attention to a text on two of its three levels."""
    widths, depth, size, text, length = (
        ((16, 32), 1, 8, 16, 4) if tiny else ((48, 96, 192), 2, 32, 128, 32)
    )
    model = _diffusers("UNet2DConditionModel")(
        sample_size=size,
        block_out_channels=widths,
        layers_per_block=depth,
        down_block_types=(*["CrossAttnDownBlock2D"] * (len(widths) - 1), "DownBlock2D"),
        up_block_types=("UpBlock2D", *["CrossAttnUpBlock2D"] * (len(widths) - 1)),
        cross_attention_dim=text,
        attention_head_dim=8,
        norm_num_groups=8 if tiny else 16,
    )

    make_batch = drawn(
        sample=normal(2, 4, size, size),
        noise=normal(2, 4, size, size),
        timestep=classes(1000, 2),
        encoder_hidden_states=normal(2, length, text),
    )

    return Made(
        model=_Denoiser(model),
        make_batch=make_batch,
        layers=(
            *(
                f"model.{side}_blocks.*.{kind}.*"
                for side in ("down", "up")
                for kind in ("resnets", "attentions")
            ),
            "model.mid_block.resnets.*",
            "model.mid_block.attentions.*",
        ),
        stages=("model.down_blocks.*", "model.mid_block", "model.up_blocks.*"),
    )


def two_streams(tiny: bool) -> Made:
    """The diffusion transformer of Stable Diffusion 3.

    Image and text are two streams that attend to each other.
    """
    layers, heads, head_width, size, text, length = (
        (2, 2, 16, 8, 16, 4) if tiny else (8, 8, 32, 32, 128, 48)
    )
    model = _diffusers("SD3Transformer2DModel")(
        sample_size=size,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=head_width,
        num_attention_heads=heads,
        joint_attention_dim=text,
        caption_projection_dim=heads * head_width,
        pooled_projection_dim=text // 2,
        pos_embed_max_size=size,
    )

    make_batch = drawn(
        sample=normal(2, 4, size, size),
        noise=normal(2, 4, size, size),
        timestep=lambda draw: 1000 * torch.rand(2, generator=draw),
        encoder_hidden_states=normal(2, length, text),
        pooled_projections=normal(2, text // 2),
    )

    return Made(
        model=_TwoStreams(model), make_batch=make_batch, layers=("model.transformer_blocks.*",)
    )


class _TwoStreams(_Denoiser):
    """A denoiser whose library calls the sample `hidden_states`."""

    def forward(self, sample: Tensor, noise: Tensor, **conditions: Tensor) -> Step:
        (prediction,) = self.model(hidden_states=sample, return_dict=False, **conditions)
        return Step(functional.mse_loss(prediction, noise), prediction)
