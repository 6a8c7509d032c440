"""Models of libraries that need code: CLIP, LLaVA, those of diffusers."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Generator, Tensor, nn
from torch.nn import functional

from bench.models.batches import normal, words
from bench.models.hf import hf, usual
from bench.models.workload import Made, Step

_WORDS = 4096


class Contrastive(nn.Module):
    """CLIP with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:  # noqa: D102
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


def llava(*, layers: int, width: int, pixels: int, length: int, rows: int) -> Made:
    """LLaVA: the patches of a vision tower replace tokens of a Llama type."""
    patch = 14
    num_patches, image_token = (pixels // patch) ** 2, _WORDS - 1
    vision = transformers.CLIPVisionConfig(
        **usual(layers, width, 8, 4 * width), image_size=pixels, patch_size=patch
    )
    text = transformers.LlamaConfig(
        **usual(layers, width, 8, 11 * width // 4, _WORDS), num_key_value_heads=8, use_cache=False
    )
    model = hf(
        "LlavaForConditionalGeneration", vision_config=vision, text_config=text,
        image_token_index=image_token, image_seq_length=num_patches, vision_feature_layer=-1,
    )  # fmt: skip
    # It normalizes the class token, which nothing reads here.
    model.model.vision_tower.post_layernorm.requires_grad_(False)

    def make_batch(draw: Generator, rows: int) -> dict[str, Tensor]:
        tokens = words(length, image_token)(draw, rows)
        tokens[:, 2 : 2 + num_patches] = image_token
        images = normal(3, pixels, pixels)(draw, rows)
        return {"input_ids": tokens, "pixel_values": images, "labels": tokens.clone()}

    return Made(
        model=model,
        make_batch=make_batch,
        rows=rows,
        layers=("model.vision_tower.encoder.layers.*", "model.language_model.layers.*"),
    )


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
