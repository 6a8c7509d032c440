"""Language models of Hugging Face: GPT-2, decoders with rotary positions, BERT, ModernBERT, T5."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import nn

from bench.models import batches
from bench.models.workload import Workload, own_loss, prepared


def _causal_workload(
    name: str,
    model: nn.Module,
    layers: Callable[[Any], Any],
    shape: tuple[int, int],
    vocabulary: int,
    device: torch.device,
) -> Workload:
    return Workload(
        name=name,
        model=prepared(model, device),
        layers=lambda module: list(layers(module)),
        loss=own_loss,
        make_batch=partial(
            batches.causal_tokens, shape=shape, vocabulary=vocabulary, device=device
        ),
    )


def gpt2(
    name: str,
    tiny: bool,
    device: torch.device,
    *,
    num_layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    shape: tuple[int, int],
) -> Workload:
    """GPT-2 as a causal language model."""
    if tiny:
        num_layers, width, heads, vocabulary, shape = min(num_layers, 3), 32, 2, 97, (2, 16)
    config = transformers.GPT2Config(
        n_layer=num_layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=max(shape[1], 64),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    # The library's default, set here because it warns where it has to choose it.
    model.loss_type = "ForCausalLM"
    return _causal_workload(
        name,
        model,
        lambda model: model.transformer.h,
        shape,
        vocabulary,
        device,
    )


def rotary(
    name: str,
    tiny: bool,
    device: torch.device,
    *,
    kind: str,
    num_layers: int,
    width: int,
    heads: int,
    key_value_heads: int,
    inner: int,
    vocabulary: int = 8192,
    experts: int = 0,
    shape: tuple[int, int] = (2, 256),
    adapter_rank: int = 0,
) -> Workload:
    """A decoder with rotary positions, RMS norms and a gated MLP.

    Args:
        name: Of the workload.
        tiny: Build the variant for tests.
        device: Where the weights are.
        kind: The library's prefix of its classes.
        num_layers: Number of layers.
        width: Of the hidden state.
        heads: Query heads.
        key_value_heads: Key and value heads.
        inner: Width of the MLP, or of one expert.
        vocabulary: Number of tokens.
        experts: Experts of each MLP, two of which take each token; 0 is a plain MLP.
        shape: Sequences and tokens of a batch.
        adapter_rank: If not 0, the model is frozen, and low-rank adapters of this rank on its
            linear layers are trained (LoRA, Hu et al., 2021).
    """
    if tiny:
        num_layers, width, inner = 2, 32, 48
        heads, key_value_heads = 2 * heads // key_value_heads, 2
        experts, vocabulary, shape = min(experts, 4), 97, (2, 16)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": inner}
    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=num_layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=width // heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=max(shape[1], 64),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
        **(mixture if experts else {}),
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    # Held apart from the model, since adapters move it.
    decoder = model.model
    if adapter_rank:
        model = _adapted(model, adapter_rank)
    return _causal_workload(name, model, lambda _: decoder.layers, shape, vocabulary, device)


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    """The model frozen, with adapters of that rank beside each linear layer but the last."""
    try:
        import peft
    except ImportError as error:
        msg = "LoRA models need the package peft: pip install peft"
        raise RuntimeError(msg) from error
    # Adapters that start at zero would leave half of the gradients zero in the first step.
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights=False
    )
    with warnings.catch_warnings():
        # peft reads an attribute that transformers has deprecated.
        warnings.filterwarnings(
            "ignore", message=".*is_gradient_checkpointing", category=FutureWarning
        )
        return peft.get_peft_model(model, config)  # pyright: ignore[reportArgumentType]


def bert(
    name: str,
    tiny: bool,
    device: torch.device,
    *,
    head: Literal["classification", "masked"],
    num_layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    shape: tuple[int, int],
) -> Workload:
    """BERT that classifies a sequence or predicts its masked tokens."""
    if tiny:
        num_layers, width, heads, vocabulary, shape = 2, 32, 2, 97, (2, 16)
    config = transformers.BertConfig(
        num_hidden_layers=num_layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        num_labels=4,  # pyright: ignore
        pad_token_id=0,
        use_cache=False,
    )
    model_type, tokens = {
        "classification": (transformers.BertForSequenceClassification, batches.classified_tokens),
        "masked": (transformers.BertForMaskedLM, batches.masked_tokens),
    }[head]
    return Workload(
        name=name,
        model=prepared(model_type(config), device),
        layers=lambda model: list(model.bert.encoder.layer),  # pyright: ignore
        loss=own_loss,
        make_batch=partial(tokens, shape=shape, vocabulary=vocabulary, device=device),
    )


def modernbert(name: str, tiny: bool, device: torch.device) -> Workload:
    """ModernBERT that predicts masked tokens.

    Two layers of three attend to a window of 64 tokens, the third to all.
    """
    num_layers, width, heads, inner, vocabulary, shape, window = 12, 384, 6, 576, 8192, (2, 256), 64
    if tiny:
        num_layers, width, heads, inner, vocabulary, shape, window = 3, 32, 2, 48, 97, (2, 16), 8
    config = transformers.ModernBertConfig(
        num_hidden_layers=num_layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=max(shape[1], 64),
        local_attention=window,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return Workload(
        name=name,
        model=prepared(transformers.ModernBertForMaskedLM(config), device),
        layers=lambda model: list(model.model.layers),  # pyright: ignore
        loss=own_loss,
        make_batch=partial(
            batches.masked_tokens, shape=shape, vocabulary=vocabulary, device=device
        ),
    )


def t5(
    name: str,
    tiny: bool,
    device: torch.device,
    *,
    num_layers: int,
    width: int,
    heads: int,
    inner: int,
    shape: tuple[int, int],
    labels_shape: tuple[int, int],
) -> Workload:
    """T5 with its published vocabulary."""
    head_width, vocabulary = 64, 32128
    if tiny:
        num_layers, width, head_width, heads, inner, vocabulary = 2, 32, 16, 2, 64, 97
        shape, labels_shape = (2, 16), (2, 8)
    config = transformers.T5Config(
        num_layers=num_layers,
        num_decoder_layers=num_layers,
        d_model=width,
        d_kv=head_width,
        d_ff=inner,
        num_heads=heads,
        vocab_size=vocabulary,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        dropout_rate=0.1,
        feed_forward_proj="relu",
        decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]
        pad_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    return Workload(
        name=name,
        model=prepared(transformers.T5ForConditionalGeneration(config), device),
        layers=lambda model: [*model.encoder.block, *model.decoder.block],  # pyright: ignore
        loss=own_loss,
        make_batch=partial(
            batches.translation_tokens,
            shape=shape,
            labels_shape=labels_shape,
            vocabulary=vocabulary,
            device=device,
        ),
    )
