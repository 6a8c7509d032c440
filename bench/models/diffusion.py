"""Diffusion models: U-Nets with attention to text, a transformer of two streams.

Needs diffusers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models.batches import classes, drawn, normal
from bench.models.workload import Made, Step

_STAGES = ("model.down_blocks.*", "model.mid_block", "model.up_blocks.*")
_OUTER = tuple(
    f"model.{side}_blocks.*.{kind}.*"
    for side in ("down", "up")
    for kind in ("resnets", "attentions")
)
_LAYERS = (*_OUTER, "model.mid_block.resnets.*", "model.mid_block.attentions.*")
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


def _diffusers(name: str) -> Any:
    try:
        import diffusers
    except ImportError as error:
        msg = f"{name} is a model of the package diffusers: pip install diffusers"
        raise RuntimeError(msg) from error
    return getattr(diffusers, name)


def conditional_unet(
    *,
    widths: list[int],
    depth: int,
    size: int,
    text: int,
    length: int,
    rows: int,
    groups: int,
    head_dim: int | list[int],
    attends: list[bool],
    pooled: int = 0,
    **fields: Any,
) -> Made:
    """The U-Net of latent diffusion, with attention to a text.

    Args:
        widths: Channels of each level.
        depth: Residual layers of a level.
        size: Height and width of a latent image.
        text: Width of the text.
        length: Its tokens.
        rows: Of a batch.
        groups: Of the normalizations.
        head_dim: As `attention_head_dim` of the library.
        attends: Whether each level attends to the text.
        pooled: Width of the pooled text that Stable Diffusion XL adds to the time; 0 without.
        **fields: Further configuration values.
    """
    model = _diffusers("UNet2DConditionModel")(
        sample_size=size, block_out_channels=tuple(widths), layers_per_block=depth,
        down_block_types=[f"{'CrossAttn' * each}DownBlock2D" for each in attends],
        up_block_types=[f"{'CrossAttn' * each}UpBlock2D" for each in reversed(attends)],
        cross_attention_dim=text, attention_head_dim=head_dim, norm_num_groups=groups, **fields,
    )  # fmt: skip
    values = {
        "sample": normal(4, size, size),
        "noise": normal(4, size, size),
        "timestep": classes(1000),
        "encoder_hidden_states": normal(length, text),
    }
    if pooled:
        values |= {"text_embeds": normal(pooled), "time_ids": lambda _, rows: torch.ones(rows, 6)}
    return Made(
        model=_Denoiser(model),
        make_batch=drawn(**values),
        rows=rows,
        layers=_LAYERS,
        stages=_STAGES,
    )


def two_streams(
    *, layers: int, heads: int, head_width: int, size: int, text: int, length: int, rows: int
) -> Made:
    """The diffusion transformer of Stable Diffusion 3.

    Image and text are two streams that attend to each other.
    """
    model = _diffusers("SD3Transformer2DModel")(
        sample_size=size, patch_size=2, in_channels=4, out_channels=4, num_layers=layers,
        attention_head_dim=head_width, num_attention_heads=heads, joint_attention_dim=text,
        caption_projection_dim=heads * head_width, pooled_projection_dim=text // 2,
        pos_embed_max_size=size,
    )  # fmt: skip
    make_batch = drawn(
        sample=normal(4, size, size),
        noise=normal(4, size, size),
        timestep=lambda draw, rows: 1000 * torch.rand(rows, generator=draw),
        encoder_hidden_states=normal(length, text),
        pooled_projections=normal(text // 2),
    )
    return Made(
        model=_Denoiser(model, "hidden_states"),
        make_batch=make_batch,
        rows=rows,
        layers=("model.transformer_blocks.*",),
    )
