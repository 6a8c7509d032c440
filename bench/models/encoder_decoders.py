"""Branched models with an encoder and a decoder: T5, BART, Whisper, `nn.Transformer`."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from bench.models.batches import drawn, normal, translated, words
from bench.models.hf import TOKENS, halves, hf
from bench.models.workload import Made, Step

_LAYERS = ("model.encoder.layers.*", "model.decoder.layers.*")


def t5_narrow(tiny: bool) -> Made:
    """T5 of 12 + 12 layers, narrow."""
    layers, width, vocabulary, source, target = (
        (2, 32, 97, (2, 16), (2, 8)) if tiny else (12, 256, 8192, (2, 160), (2, 80))
    )
    model = hf(
        "T5ForConditionalGeneration", vocab_size=vocabulary, d_model=width, d_kv=width // 8,
        num_heads=8, d_ff=4 * width, num_layers=layers, num_decoder_layers=layers,
        decoder_start_token_id=0,
    )  # fmt: skip
    return Made(
        model=model,
        make_batch=translated(source, target, vocabulary),
        layers=("encoder.block.*", "decoder.block.*"),
    )


def bart(tiny: bool) -> Made:
    """BART-base, half as wide."""
    layers, width, vocabulary, source, target = (
        (2, 36, 97, (2, 16), (2, 8)) if tiny else (6, 384, 8192, (2, 256), (2, 128))
    )
    model = hf(
        "BartForConditionalGeneration", **halves(layers, width, 6), vocab_size=vocabulary,
        max_position_embeddings=source[1], pad_token_id=1, bos_token_id=0, eos_token_id=2,
        decoder_start_token_id=2,
    )  # fmt: skip
    return Made(model=model, make_batch=translated(source, target, vocabulary), layers=_LAYERS)


def whisper(tiny: bool) -> Made:
    """Whisper-tiny on 8 seconds of sound."""
    layers, width, vocabulary, positions, target = (
        (2, 36, 97, 16, (2, 8)) if tiny else (4, 384, 8192, 400, (2, 64))
    )
    model = hf(
        "WhisperForConditionalGeneration", **halves(layers, width, 6), **TOKENS,
        vocab_size=vocabulary, max_source_positions=positions, max_target_positions=target[1],
        decoder_start_token_id=1,
    )  # fmt: skip
    sound = normal(target[0], model.config.num_mel_bins, 2 * positions)
    make_batch = drawn(input_features=sound, labels=words(target, vocabulary))
    return Made(model=model, make_batch=make_batch, layers=_LAYERS)


class _Transformer(nn.Module):
    """`nn.Transformer` that learns to return its target."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.model = nn.Transformer(width, 8, layers, layers, 4 * width, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, src: Tensor, tgt: Tensor) -> Step:
        prediction = self.head(self.model(src, tgt))
        return Step(functional.mse_loss(prediction, tgt), prediction)


def transformer(tiny: bool) -> Made:
    """`nn.Transformer` of 6 + 6 layers."""
    layers, width, source, target = (
        (2, 32, (2, 12), (2, 8)) if tiny else (6, 256, (4, 128), (4, 96))
    )
    make_batch = drawn(src=normal(*source, width), tgt=normal(*target, width))
    return Made(model=_Transformer(layers, width), make_batch=make_batch, layers=_LAYERS)
