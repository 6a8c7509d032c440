"""Branched models with two towers: CLIP, and a vision tower in front of a Llama type."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from bench.models.branched import BranchedModel, random_tokens


class _Contrastive(nn.Module):
    """CLIP with its loss."""

    def __init__(self, config: transformers.CLIPConfig) -> None:
        super().__init__()
        self.model = transformers.CLIPModel(config)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


def clip(tiny: bool) -> BranchedModel:
    """CLIP: text of width 256, images of width 384."""
    layers, text, image, pixels, length, batch = (
        (2, 32, 36, 32, 8, 2) if tiny else (6, 256, 384, 112, 48, 8)
    )
    vocabulary, special = 4096, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    towers: dict[str, Any] = {
        "text_config": {
            "vocab_size": vocabulary,
            "hidden_size": text,
            "intermediate_size": 4 * text,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "max_position_embeddings": length,
            **special,
        },
        "vision_config": {
            "hidden_size": image,
            "intermediate_size": 4 * image,
            "num_hidden_layers": layers,
            "num_attention_heads": 6,
            "image_size": pixels,
            "patch_size": 16,
        },
    }
    config = transformers.CLIPConfig(**towers, projection_dim=text)

    def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
        images = torch.randn(batch, 3, pixels, pixels, generator=generator)
        return {
            "input_ids": random_tokens(generator, vocabulary, batch, length),
            "pixel_values": images,
        }

    return BranchedModel(
        model=_Contrastive(config),
        make_batch=make_batch,
        blocks=("model.text_model.encoder.layers.*", "model.vision_model.encoder.layers.*"),
    )


def llava(tiny: bool) -> BranchedModel:
    """LLaVA: the patches of a vision tower replace tokens of a Llama type."""
    layers, width, pixels, length, batch = (2, 32, 28, 16, 2) if tiny else (6, 256, 112, 160, 2)
    vocabulary, patch = 4096, 14
    num_patches, image_token = (pixels // patch) ** 2, vocabulary - 1
    vision = transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        image_size=pixels,
        patch_size=patch,
    )
    text = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_token,
        image_seq_length=num_patches,
        vision_feature_layer=-1,
    )

    def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
        tokens = random_tokens(generator, image_token, batch, length)
        tokens[:, 2 : 2 + num_patches] = image_token
        images = torch.randn(batch, 3, pixels, pixels, generator=generator)
        return {"input_ids": tokens, "pixel_values": images, "labels": tokens.clone()}

    model = transformers.LlavaForConditionalGeneration(config)
    # It normalizes the class token, which nothing reads here.
    model.model.vision_tower.post_layernorm.requires_grad_(False)
    return BranchedModel(
        model=model,
        make_batch=make_batch,
        blocks=("model.vision_tower.encoder.layers.*", "model.language_model.layers.*"),
    )
