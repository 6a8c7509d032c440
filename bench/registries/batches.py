"""A batch for one training call of a tiny model, from its configuration and its arguments."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

_BATCH, _LENGTH, _IMAGE, _SOUND, _FRAMES = 2, 16, 64, 4000, 128
_WORDS = (10, 200)  # the lowest and highest ids are special ones


def make_batch(registry: str, model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Keyword arguments with labels; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    accepted = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    batch = _images(model, generator) if registry.startswith("image") else {}
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
) -> dict[str, Tensor]:
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
