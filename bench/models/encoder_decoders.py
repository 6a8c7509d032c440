"""Branched models with an encoder and a decoder: T5, BART, Whisper, `nn.Transformer`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from bench.models.branched import BranchedModel, Step, random_tokens


def t5_narrow(tiny: bool) -> BranchedModel:
    """T5 of 12 + 12 layers, narrow."""
    layers, width, vocabulary, source, target = (
        (2, 32, 97, (2, 16), (2, 8)) if tiny else (12, 256, 8192, (2, 160), (2, 80))
    )
    config = transformers.T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // 8,
        num_heads=8,
        d_ff=4 * width,
        num_layers=layers,
        num_decoder_layers=layers,
        decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]
        use_cache=False,
    )
    return BranchedModel(
        model=transformers.T5ForConditionalGeneration(config),
        make_batch=partial(_translation, vocabulary=vocabulary, source=source, target=target),
        blocks=("encoder.block.*", "decoder.block.*"),
    )


def bart(tiny: bool) -> BranchedModel:
    """BART-base, half as wide."""
    layers, width, vocabulary, source, target = (
        (2, 36, 97, (2, 16), (2, 8)) if tiny else (6, 384, 8192, (2, 256), (2, 128))
    )
    config = transformers.BartConfig(
        vocab_size=vocabulary,
        max_position_embeddings=source[1],
        **_encoder_decoder(layers, width),
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,  # pyright: ignore[reportCallIssue]
        use_cache=False,
    )
    return BranchedModel(
        model=transformers.BartForConditionalGeneration(config),
        make_batch=partial(_translation, vocabulary=vocabulary, source=source, target=target),
        blocks=("model.encoder.layers.*", "model.decoder.layers.*"),
    )


def whisper(tiny: bool) -> BranchedModel:
    """Whisper-tiny on 8 seconds of sound."""
    layers, width, vocabulary, positions, target = (
        (2, 36, 97, 16, (2, 8)) if tiny else (4, 384, 8192, 400, (2, 64))
    )
    config = transformers.WhisperConfig(
        vocab_size=vocabulary,
        max_source_positions=positions,
        max_target_positions=target[1],
        **_encoder_decoder(layers, width),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )

    def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
        sound = torch.randn(target[0], config.num_mel_bins, 2 * positions, generator=generator)
        return {"input_features": sound, "labels": random_tokens(generator, vocabulary, *target)}

    return BranchedModel(
        model=transformers.WhisperForConditionalGeneration(config),
        make_batch=make_batch,
        blocks=("model.encoder.layers.*", "model.decoder.layers.*"),
    )


def _encoder_decoder(layers: int, width: int) -> dict[str, Any]:
    return {
        "d_model": width,
        **{f"{side}_layers": layers for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 6 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 4 * width for side in ("encoder", "decoder")},
    }


def _translation(
    generator: torch.Generator, *, vocabulary: int, source: tuple[int, int], target: tuple[int, int]
) -> dict[str, Tensor]:
    return {
        "input_ids": random_tokens(generator, vocabulary, *source),
        "labels": random_tokens(generator, vocabulary, *target),
    }


class _Transformer(nn.Module):
    """`nn.Transformer` that learns to return its target."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.model = nn.Transformer(width, 8, layers, layers, 4 * width, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, src: Tensor, tgt: Tensor) -> Step:
        prediction = self.head(self.model(src, tgt))
        return Step(functional.mse_loss(prediction, tgt), prediction)


def transformer(tiny: bool) -> BranchedModel:
    """`nn.Transformer` of 6 + 6 layers."""
    layers, width, source, target = (
        (2, 32, (2, 12), (2, 8)) if tiny else (6, 256, (4, 128), (4, 96))
    )

    def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "src": torch.randn(*source, width, generator=generator),
            "tgt": torch.randn(*target, width, generator=generator),
        }

    return BranchedModel(
        model=_Transformer(layers, width),
        make_batch=make_batch,
        blocks=("model.encoder.layers.*", "model.decoder.layers.*"),
    )
