"""Models with an encoder and a decoder: T5, BART, Whisper, `nn.Transformer`."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from bench.models.batches import drawn, normal, translated, words
from bench.models.hf import TOKENS, halves, hf
from bench.models.workload import Made, Step

_LAYERS = ("model.encoder.layers.*", "model.decoder.layers.*")


def t5(
    *,
    layers: int,
    width: int,
    heads: int,
    head_width: int,
    inner: int,
    vocabulary: int,
    rows: int,
    source: int,
    target: int,
) -> Made:
    """T5."""
    model = hf(
        "T5ForConditionalGeneration", num_layers=layers, num_decoder_layers=layers, d_model=width,
        d_kv=head_width, d_ff=inner, num_heads=heads, vocab_size=vocabulary,
        decoder_start_token_id=0,
    )  # fmt: skip
    make_batch = translated(source, target, vocabulary)
    layer_paths = ("encoder.block.*", "decoder.block.*")
    return Made(model=model, make_batch=make_batch, rows=rows, layers=layer_paths)


def bart(
    *, layers: int, width: int, heads: int, vocabulary: int, rows: int, source: int, target: int
) -> Made:
    """BART."""
    model = hf(
        "BartForConditionalGeneration", **halves(layers, width, heads), vocab_size=vocabulary,
        max_position_embeddings=source, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        decoder_start_token_id=2,
    )  # fmt: skip
    make_batch = translated(source, target, vocabulary)
    return Made(model=model, make_batch=make_batch, rows=rows, layers=_LAYERS)


def whisper(
    *, layers: int, width: int, heads: int, vocabulary: int, rows: int, positions: int, target: int
) -> Made:
    """Whisper, on two frames of sound a position."""
    model = hf(
        "WhisperForConditionalGeneration", **halves(layers, width, heads), **TOKENS,
        vocab_size=vocabulary, max_source_positions=positions, max_target_positions=target,
        decoder_start_token_id=1,
    )  # fmt: skip
    sound = normal(model.config.num_mel_bins, 2 * positions)
    make_batch = drawn(input_features=sound, labels=words(target, vocabulary))
    return Made(model=model, make_batch=make_batch, rows=rows, layers=_LAYERS)


class _Transformer(nn.Module):
    """`nn.Transformer` that learns to return its target."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.model = nn.Transformer(width, 8, layers, layers, 4 * width, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, src: Tensor, tgt: Tensor) -> Step:
        prediction = self.head(self.model(src, tgt))
        return Step(functional.mse_loss(prediction, tgt), prediction)


def transformer(*, layers: int, width: int, rows: int, source: int, target: int) -> Made:
    """`nn.Transformer`."""
    make_batch = drawn(src=normal(source, width), tgt=normal(target, width))
    model = _Transformer(layers, width)
    return Made(model=model, make_batch=make_batch, rows=rows, layers=_LAYERS)
