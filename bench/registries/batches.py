"""A batch for one training call of a tiny model, from its configuration and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench.registries.fields import WithLoss

_BATCH, _LENGTH, _IMAGE, _SOUND, _FRAMES = 2, 16, 64, 4000, 128
_WORDS = (10, 200)  # the lowest and highest ids are special ones


def make_batch(registry: str, model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Keyword arguments with labels; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    model = model.model if isinstance(model, WithLoss) else model
    accepted = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if registry == "image-text-to-text":
        return _images_and_text(model, accepted, generator)
    sees = main == "pixel_values" or "zero-shot" in registry
    batch = _images(model, generator) if sees else {}
    if registry == "video-classification" or "pixel_values_videos" in accepted:
        batch = _video(model, generator)
        batch = batch | {"pixel_values_videos": batch["pixel_values"]}
    if "zero-shot" in registry:
        batch |= _questions(generator)
    if not batch and main in ("input_values", "input_features", "audio_values"):
        batch = {main: _sound(main, registry, model, generator)}
    if not batch or registry == "causal-lm":
        batch = {"input_ids": _words(generator)}
    batch |= _labels(registry, model, batch, generator)
    return {name: value for name, value in batch.items() if name in accepted}


def _words(generator: torch.Generator, length: int = _LENGTH) -> Tensor:
    return torch.randint(*_WORDS, (_BATCH, length), generator=generator)


def _images(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", None)
    side = size if isinstance(size, int) else _IMAGE
    channels = getattr(config, "num_channels", 3)
    shape = (_BATCH, channels, side, side)
    return {"pixel_values": torch.rand(shape, generator=generator)}


def _video(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    images = _images(model, generator)["pixel_values"]
    config = model.config
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", 4)
    return {"pixel_values": images[:, None].repeat(1, frames, 1, 1, 1)}


def _questions(generator: torch.Generator) -> dict[str, Tensor]:
    """A text for each image, under the names that models have for it."""
    words = _words(generator)
    kinds = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    classes = {f"classes_{name}": value for name, value in kinds.items()}
    return kinds | classes


def _regions(registry: str, model: Any, side: int, generator: torch.Generator) -> dict[str, Any]:
    """A class for each pixel, or two regions in each image, as boxes and masks."""
    count = getattr(model.config, "num_labels", 2)
    if registry == "semantic-segmentation":
        return {"labels": torch.randint(count, (_BATCH, side, side), generator=generator)}
    regions = [
        {
            "class_labels": torch.randint(count, (2,), generator=generator),
            "boxes": torch.rand(2, 4, generator=generator) / 2 + 0.25,
            "masks": torch.rand(2, side, side, generator=generator).round(),
        }
        for _ in range(_BATCH)
    ]
    return {
        "labels": regions,
        "class_labels": [each["class_labels"] for each in regions],
        "mask_labels": [each["masks"] for each in regions],
        "task_inputs": _words(generator),
    }


def _images_and_text(
    model: Any, accepted: Mapping[str, Any], generator: torch.Generator
) -> dict[str, Tensor]:
    """Rows of words that each have as many places for an image as the model makes of it."""
    images = _images(model, generator)
    if "image_grid_thw" in accepted:
        images = _patches(model, generator)
    elif "image_sizes" in accepted:
        side = images["pixel_values"].shape[-1]
        images["image_sizes"] = torch.tensor([[side, side]] * _BATCH)
    images |= _further(model, images, generator)
    place = getattr(
        model.config, "image_token_id", getattr(model.config, "image_token_index", None)
    )
    images, count = _as_taken(model, images)
    words = _words(generator, count + _LENGTH // 2)
    if isinstance(place, int):
        words[:, 1 : 1 + count] = place
    is_image = (
        words == place if isinstance(place, int) else torch.zeros_like(words, dtype=torch.bool)
    )
    batch = images | {
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "token_type_ids": is_image.long(),
        "mm_token_type_ids": is_image.int(),
        "labels": words.masked_fill(is_image, -100),
    }
    return {name: value for name, value in batch.items() if name in accepted}


def _further(
    model: Any, images: dict[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """What some models take beside images: questions to them, their sizes in patches."""
    words = _words(generator)
    further = {
        "qformer_input_ids": words,
        "qformer_attention_mask": torch.ones_like(words),
        "image_merge_sizes": torch.ones(_BATCH, dtype=torch.int64),
        "aspect_ratio_ids": torch.ones(_BATCH, 1, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(_BATCH, 1, 4, dtype=torch.int64),
    }
    if "pixel_values" in images:
        further["high_res_pixel_values"] = images["pixel_values"]
    takers = (model.forward, getattr(model, "get_image_features", model.forward))
    names = {name for each in takers for name in inspect.signature(each).parameters}
    return {name: value for name, value in further.items() if name in names}


def _patches(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Images cut into patches, as many a side as their grids say."""
    config = model.config.vision_config
    channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", None) or 3
    width = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    grid = torch.tensor([[1, 8, 8]] * _BATCH)
    patches = torch.randn(int(grid.prod(1).sum()), width, generator=generator)
    return {"pixel_values": patches, "image_grid_thw": grid}


def _as_taken(model: Any, images: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Images in the form that the model takes, and how many rows it makes of each.

    As they are, without their sizes, as lists of tiles, or as tiles behind the whole image.
    """
    unsized = {name: value for name, value in images.items() if name != "image_sizes"}
    tiles = images["pixel_values"][:, None]
    several = tiles.repeat(1, 2, *[1] * (tiles.ndim - 2))
    first: Exception | None = None
    for more in (
        images,
        unsized,
        images | {"pixel_values": tiles},
        images | {"pixel_values": several},
    ):
        try:
            return more, _num_places(model, more)
        except Exception as error:  # noqa: BLE001
            first = first or error
    assert first is not None
    raise first


@torch.no_grad()
def _num_places(model: Any, images: dict[str, Tensor]) -> int:
    """How many rows the model makes of each image."""
    make = getattr(model, "get_image_features", None)
    if make is None:
        return 0
    accepted = inspect.signature(make).parameters
    made = make(**{name: value for name, value in images.items() if name in accepted})
    rows = getattr(made, "pooler_output", made)
    rows = [rows] if isinstance(rows, Tensor) else rows
    return sum(each.shape[:-1].numel() for each in rows) // _BATCH


def _sound(main: str, registry: str, model: Any, generator: torch.Generator) -> Tensor:
    config = model.config
    encoder = getattr(config, "audio_config", None) or getattr(config, "encoder_config", config)
    bins = next(
        (
            value
            for name in (
                "num_mel_bins",
                "feature_size",
                "input_dim",
                "feature_projection_input_dim",
            )
            if isinstance(value := getattr(encoder, name, None), int)
        ),
        80,
    )
    if main == "input_values" and hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
        shape: tuple[int, ...] = (_BATCH, config.max_length, bins)
    elif main == "input_values":
        shape = (_BATCH, _SOUND)
    elif type(model).__name__.startswith("Whisper"):
        shape = (_BATCH, bins, 2 * config.max_source_positions)
    else:
        shape = (_BATCH, _FRAMES, bins)
    return torch.randn(shape, generator=generator)


def _labels(
    registry: str, model: Any, batch: dict[str, Tensor], generator: torch.Generator
) -> dict[str, Any]:
    if "detection" in registry or "segmentation" in registry:
        return _regions(registry, model, batch["pixel_values"].shape[-1], generator)
    if registry in ("depth-estimation", "zero-shot-image-classification"):
        return {"return_loss": True}
    if "classification" in registry:
        count = getattr(model.config, "num_labels", 2)
        return {"labels": torch.randint(count, (_BATCH,), generator=generator)}
    if registry == "ctc":
        return {"labels": _words(generator, 4) % (model.config.vocab_size - 1) + 1}
    if registry == "masked-lm":
        labels = batch["input_ids"].clone()
        labels[:, ::3] = -100
        return {"labels": labels}
    is_decoder = "input_ids" in batch and not getattr(model.config, "is_encoder_decoder", False)
    if registry == "causal-lm" or is_decoder:
        return {"labels": batch["input_ids"].clone()}
    return {"labels": _words(generator, 8)}
