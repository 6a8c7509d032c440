"""Language models: GPT-2, decoders with rotary positions, BERT, ModernBERT; any of the library."""

from __future__ import annotations

from typing import Any, Literal

from bench.models import batches
from bench.models.hf import TOKENS, hf, quantized, usual, with_adapters
from bench.models.workload import Made


def gpt2(*, layers: int, width: int, heads: int, words: int, rows: int, length: int) -> Made:
    """GPT-2 as a causal language model."""
    special = dict.fromkeys(TOKENS, 0)
    model = hf(
        "GPT2LMHeadModel", n_layer=layers, n_embd=width, n_head=heads, vocab_size=words,
        n_positions=max(length, 64), **special,
    )  # fmt: skip
    make_batch = batches.causal(length, words)
    return Made(model=model, make_batch=make_batch, rows=rows, layers=("transformer.h.*",))


def rotary(
    *,
    kind: str,
    layers: int,
    width: int,
    heads: int,
    shared_heads: int,
    inner: int,
    words: int,
    rows: int,
    length: int,
    experts: int = 0,
    head_width: int = 0,
    rank: int = 0,
    is_quantized: bool = False,
    **fields: Any,
) -> Made:
    """A decoder with rotary positions, RMS norms and a gated MLP.

    Args:
        kind: The library's prefix of its classes.
        layers: Number of layers.
        width: Of the hidden state.
        heads: Query heads.
        shared_heads: Key and value heads.
        inner: Width of the MLP, or of one expert.
        words: Size of the vocabulary.
        rows: Sequences of a batch.
        length: Tokens of a sequence.
        experts: Experts of each MLP, two of which take each token; 0 is a plain MLP.
        head_width: Of a head; 0 divides the width among the heads.
        rank: If not 0, the model is frozen, and low-rank adapters of this rank on its linear layers
            are trained (LoRA, Hu et al., 2021).
        is_quantized: Whether the frozen model is in 4 bits (QLoRA, Dettmers et al., 2023).
        **fields: Further ones of the configuration.
    """
    mixture: dict[str, Any] = (
        {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": inner}
        if experts
        else {}
    )
    model = hf(
        f"{kind}ForCausalLM", **usual(layers, width, heads, inner, words),
        num_key_value_heads=shared_heads, head_dim=head_width or width // heads,
        max_position_embeddings=max(length, 64), **TOKENS, **mixture | fields,
    )  # fmt: skip
    model = quantized(model) if is_quantized else model
    return Made(
        model=with_adapters(model, rank) if rank else model,
        make_batch=batches.causal(length, words),
        rows=rows,
        layers=("base_model.model.model.layers.*" if rank else "model.layers.*",),
    )


def bert(
    *,
    head: Literal["SequenceClassification", "MaskedLM"],
    layers: int,
    width: int,
    heads: int,
    words: int,
    rows: int,
    length: int,
) -> Made:
    """BERT that classifies a sequence or predicts its masked tokens."""
    model = hf(
        f"BertFor{head}", **usual(layers, width, heads, 4 * width, words), num_labels=4,
        pad_token_id=0,
    )  # fmt: skip
    is_masked = head == "MaskedLM"
    make_batch = (
        batches.masked(length, words) if is_masked else batches.classified(length, words, 4)
    )
    return Made(model=model, make_batch=make_batch, rows=rows, layers=("bert.encoder.layer.*",))


def modernbert(
    *,
    layers: int,
    width: int,
    heads: int,
    inner: int,
    words: int,
    rows: int,
    length: int,
    window: int,
) -> Made:
    """ModernBERT that predicts masked tokens.

    Two layers of three attend to a window of tokens, the third to all.
    """
    model = hf(
        "ModernBertForMaskedLM", **usual(layers, width, heads, inner, words), **TOKENS,
        max_position_embeddings=max(length, 64), local_attention=window, cls_token_id=1,
        sep_token_id=2,
    )  # fmt: skip
    make_batch = batches.masked(length, words)
    return Made(model=model, make_batch=make_batch, rows=rows, layers=("model.layers.*",))


def library(*, kind: str, batch: str, sizes: list[int], rows: int, **fields: Any) -> Made:
    """Any model of the library, by its class and the fields of its configuration.

    Args:
        kind: The class.
        batch: A function of `bench.models.batches`.
        sizes: What it takes.
        rows: Of a batch.
        **fields: Of the configuration.
    """
    make_batch = getattr(batches, batch)(*sizes)
    return Made(model=hf(kind, **fields), make_batch=make_batch, rows=rows, layers=())


def recurrent(*, kind: str, layers: int, length: int, vocab_size: int, **fields: Any) -> Made:
    """A decoder with recurrent layers, for sequences of one length; `fields` as for `library`."""
    longest = "context_length" if kind.startswith("Rwkv") else "max_position_embeddings"
    fields[longest] = length
    return library(
        kind=kind, sizes=[length, vocab_size], vocab_size=vocab_size, num_hidden_layers=layers,
        **TOKENS, **fields,
    )  # fmt: skip
