"""Models of Hugging Face, made from configuration values that are written out here."""

from __future__ import annotations

import warnings
from typing import Any

import transformers
from torch import nn

TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def hf(kind: str, **fields: Any) -> Any:
    """A model in train mode, with no key-value cache.

    Args:
        kind: its class, such as "GPT2LMHeadModel".
        **fields: of its configuration.
    """
    make: Any = getattr(transformers, kind)
    config = make.config_class(**fields)
    config.use_cache = False
    model = make(config).train()
    if kind == "GPT2LMHeadModel":
        # The library's default, set here because it warns where it has to choose it.
        model.loss_type = "ForCausalLM"
    return model


def usual(layers: int, width: int, heads: int, inner: int, words: int = 0) -> dict[str, Any]:
    """The fields of most configurations; those of images have no words."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        **({"vocab_size": words} if words else {}),
    }


def halves(layers: int, width: int, heads: int, **both: Any) -> dict[str, Any]:
    """The fields of an encoder and a decoder of equal sizes."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width, **both}
    fields = {f"{half}_{k}": v for half in ("encoder", "decoder") for k, v in sizes.items()}
    return {"d_model": width, **fields}


def with_adapters(model: Any, rank: int) -> nn.Module:
    """The model frozen, with adapters of that rank beside each linear layer but the last.

    They do not start at zero, which would leave half of the gradients zero in the first step.
    """
    try:
        import peft
    except ImportError as error:
        raise RuntimeError("LoRA models need the package peft: pip install peft") from error
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights=False
    )
    with warnings.catch_warnings():
        # peft reads an attribute that transformers has deprecated.
        warnings.filterwarnings(
            "ignore", message=".*is_gradient_checkpointing", category=FutureWarning
        )
        return peft.get_peft_model(model, config)  # pyright: ignore[reportArgumentType]


def quantized(model: Any) -> Any:
    """The model with the linear layers of its blocks in NF4. Needs bitsandbytes."""
    import bitsandbytes

    kinds: Any = bitsandbytes.nn
    four_bits = {"quant_type": "nf4", "compress_statistics": True}
    for layer in model.model.layers:
        for path, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                small = kinds.Linear4bit(
                    module.in_features, module.out_features, bias=False,
                    compute_dtype=module.weight.dtype, **four_bits,
                )  # fmt: skip
                small.weight = kinds.Params4bit(
                    module.weight.data, requires_grad=False, **four_bits
                )
                parent, _, name = path.rpartition(".")
                setattr(layer.get_submodule(parent), name, small.to("cpu"))
    return model
