"""Small decoders with recurrent layers, of Hugging Face, whose steps have many small ops.

Gated DeltaNet, Kimi's delta attention and RWKV run a loop over tokens or chunks of them, which a
trace unrolls. So a few layers make thousands of ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from bench.models.batches import causal_tokens

_WIDTH, _VOCABULARY = 64, 256
_COMMON = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_KIMI = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


class _Kind(NamedTuple):
    """A class of transformers with the fields of a small model."""

    config: str
    model: str
    fields: dict[str, Any]


_KINDS = {
    "qwen3-next": _Kind(
        "Qwen3NextConfig", "Qwen3NextForCausalLM", _HEADS | {"head_dim": 16} | _DELTA | _EXPERTS
    ),
    "qwen3.5": _Kind("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _HEADS | {"head_dim": 16} | _DELTA),
    "kimi-linear": _Kind("KimiLinearConfig", "KimiLinearForCausalLM", _KIMI),
    "olmo-hybrid": _Kind("OlmoHybridConfig", "OlmoHybridForCausalLM", _HEADS | _DELTA),
    "rwkv": _Kind("RwkvConfig", "RwkvForCausalLM", {"attention_hidden_size": _WIDTH}),
}
NAMES = tuple(_KINDS)


class RecurrentModel(NamedTuple):
    """A model in train mode with a batch of one sequence, which holds its labels."""

    model: nn.Module
    sample: dict[str, Tensor]


def recurrent(name: str, *, num_layers: int, num_tokens: int) -> RecurrentModel:
    """The small model of one of `NAMES`.

    Args:
        name: of the model.
        num_layers: number of layers; the kinds of layers alternate as the model's default says.
        num_tokens: length of the one sequence.
    """
    kind = _KINDS[name]
    make_config: Callable[..., Any] = getattr(transformers, kind.config)
    length = {"context_length" if name == "rwkv" else "max_position_embeddings": num_tokens}
    config = make_config(num_hidden_layers=num_layers, **_COMMON, **kind.fields, **length)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, kind.model)(config).train()
    shape, device = (1, num_tokens), torch.device("cpu")
    batch = causal_tokens(0, shape=shape, vocabulary=_VOCABULARY, device=device)
    return RecurrentModel(model, dict(batch))
