"""Branched models with two towers: CLIP, and a vision tower in front of a Llama type."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Generator, Tensor, nn

from bench.models.batches import drawn, normal, words
from bench.models.hf import TOKENS, hf, usual
from bench.models.workload import Made


class _Contrastive(nn.Module):
    """CLIP with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


def clip(tiny: bool) -> Made:
    """CLIP: text of width 256, images of width 384."""
    layers, text, image, pixels, length, batch = (
        (2, 32, 36, 32, 8, 2) if tiny else (6, 256, 384, 112, 48, 8)
    )
    vocabulary = 4096
    text_fields = usual(layers, text, 4, 4 * text, vocabulary) | TOKENS
    model = hf(
        "CLIPModel",
        text_config=text_fields | {"max_position_embeddings": length},
        vision_config=usual(layers, image, 6, 4 * image) | {"image_size": pixels, "patch_size": 16},
        projection_dim=text,
    )
    make_batch = drawn(
        pixel_values=normal(batch, 3, pixels, pixels), input_ids=words((batch, length), vocabulary)
    )
    return Made(
        model=_Contrastive(model),
        make_batch=make_batch,
        layers=("model.text_model.encoder.layers.*", "model.vision_model.encoder.layers.*"),
    )


def llava(tiny: bool) -> Made:
    """LLaVA: the patches of a vision tower replace tokens of a Llama type."""
    layers, width, pixels, length, batch = (2, 32, 28, 16, 2) if tiny else (6, 256, 112, 160, 2)
    vocabulary, patch = 4096, 14
    num_patches, image_token = (pixels // patch) ** 2, vocabulary - 1
    vision = transformers.CLIPVisionConfig(
        **usual(layers, width, 8, 4 * width), image_size=pixels, patch_size=patch
    )
    text = transformers.LlamaConfig(
        **usual(layers, width, 8, 11 * width // 4, vocabulary), num_key_value_heads=8,
        use_cache=False,
    )  # fmt: skip
    model = hf(
        "LlavaForConditionalGeneration", vision_config=vision, text_config=text,
        image_token_index=image_token, image_seq_length=num_patches, vision_feature_layer=-1,
    )  # fmt: skip
    # It normalizes the class token, which nothing reads here.
    model.model.vision_tower.post_layernorm.requires_grad_(False)

    def make_batch(draw: Generator) -> dict[str, Tensor]:
        tokens = words((batch, length), image_token)(draw)
        tokens[:, 2 : 2 + num_patches] = image_token
        images = normal(batch, 3, pixels, pixels)(draw)
        return {"input_ids": tokens, "pixel_values": images, "labels": tokens.clone()}

    return Made(
        model=model,
        make_batch=make_batch,
        layers=("model.vision_tower.encoder.layers.*", "model.language_model.layers.*"),
    )
