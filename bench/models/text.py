"""Language models: GPT-2, decoders with rotary positions, BERT, ModernBERT, T5."""

from __future__ import annotations

from typing import Any, Literal

from bench.models import batches
from bench.models.hf import TOKENS, hf, quantized, usual, with_adapters
from bench.models.workload import Made

Shape = tuple[int, int]


def gpt2(tiny: bool, *, layers: int, width: int, heads: int, words: int, shape: Shape) -> Made:
    """GPT-2 as a causal language model."""
    if tiny:
        layers, width, heads, words, shape = min(layers, 3), 32, 2, 97, (2, 16)
    special = dict.fromkeys(TOKENS, 0)
    model = hf(
        "GPT2LMHeadModel", n_layer=layers, n_embd=width, n_head=heads, vocab_size=words,
        n_positions=max(shape[1], 64), **special,
    )  # fmt: skip
    return Made(model=model, make_batch=batches.causal(shape, words), layers=("transformer.h.*",))


def rotary(
    tiny: bool,
    *,
    kind: str,
    layers: int,
    width: int,
    heads: int,
    shared_heads: int,
    inner: int,
    words: int = 8192,
    experts: int = 0,
    shape: Shape = (2, 256),
    rank: int = 0,
    is_quantized: bool = False,
) -> Made:
    """A decoder with rotary positions, RMS norms and a gated MLP.

    Args:
        tiny: Build the variant for tests.
        kind: The library's prefix of its classes.
        layers: Number of layers.
        width: Of the hidden state.
        heads: Query heads.
        shared_heads: Key and value heads.
        inner: Width of the MLP, or of one expert.
        words: Size of the vocabulary.
        experts: Experts of each MLP, two of which take each token; 0 is a plain MLP.
        shape: Sequences and tokens of a batch.
        rank: If not 0, the model is frozen, and low-rank adapters of this rank on its linear layers
            are trained (LoRA, Hu et al., 2021).
        is_quantized: Whether the frozen model is in 4 bits (QLoRA, Dettmers et al., 2023).
    """
    if tiny:
        layers, width, inner = 2, 32, 48
        heads, shared_heads = 2 * heads // shared_heads, 2
        experts, words, shape = min(experts, 4), 97, (2, 16)
    mixture: dict[str, Any] = (
        {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": inner}
        if experts
        else {}
    )
    model = hf(
        f"{kind}ForCausalLM", **usual(layers, width, heads, inner, words),
        num_key_value_heads=shared_heads, head_dim=width // heads,
        max_position_embeddings=max(shape[1], 64), **TOKENS, **mixture,
    )  # fmt: skip
    model = quantized(model) if is_quantized else model
    return Made(
        model=with_adapters(model, rank) if rank else model,
        make_batch=batches.causal(shape, words),
        layers=("base_model.model.model.layers.*" if rank else "model.layers.*",),
    )


def bert(
    tiny: bool,
    *,
    head: Literal["SequenceClassification", "MaskedLM"],
    layers: int,
    width: int,
    heads: int,
    words: int,
    shape: Shape,
) -> Made:
    """BERT that classifies a sequence or predicts its masked tokens."""
    if tiny:
        layers, width, heads, words, shape = 2, 32, 2, 97, (2, 16)
    model = hf(
        f"BertFor{head}", **usual(layers, width, heads, 4 * width, words), num_labels=4,
        pad_token_id=0,
    )  # fmt: skip
    make_batch = (
        batches.masked(shape, words)
        if head == "MaskedLM"
        else batches.drawn(
            input_ids=batches.words(shape, words), labels=batches.classes(4, shape[0])
        )
    )
    return Made(model=model, make_batch=make_batch, layers=("bert.encoder.layer.*",))


def modernbert(tiny: bool) -> Made:
    """ModernBERT that predicts masked tokens.

    Two layers of three attend to a window of 64 tokens, the third to all.
    """
    layers, width, heads, inner, words, shape, window = 12, 384, 6, 576, 8192, (2, 256), 64
    if tiny:
        layers, width, heads, inner, words, shape, window = 3, 32, 2, 48, 97, (2, 16), 8
    model = hf(
        "ModernBertForMaskedLM", **usual(layers, width, heads, inner, words), **TOKENS,
        max_position_embeddings=max(shape[1], 64), local_attention=window, cls_token_id=1,
        sep_token_id=2,
    )  # fmt: skip
    return Made(model=model, make_batch=batches.masked(shape, words), layers=("model.layers.*",))


def t5(
    tiny: bool,
    *,
    layers: int,
    width: int,
    heads: int,
    head_width: int = 64,
    inner: int,
    words: int = 32128,
    source: Shape,
    target: Shape,
) -> Made:
    """T5, with its published vocabulary by default."""
    if tiny:
        layers, width, head_width, heads, inner, words = 2, 32, 16, 2, 64, 97
        source, target = (2, 16), (2, 8)
    model = hf(
        "T5ForConditionalGeneration", num_layers=layers, num_decoder_layers=layers, d_model=width,
        d_kv=head_width, d_ff=inner, num_heads=heads, vocab_size=words, decoder_start_token_id=0,
    )  # fmt: skip
    return Made(
        model=model,
        make_batch=batches.translated(source, target, words),
        layers=("encoder.block.*", "decoder.block.*"),
    )
