"""Small decoders with recurrent layers, of Hugging Face, whose steps have many small ops.

Gated DeltaNet, Kimi's delta attention and RWKV run a loop over tokens or chunks of them, which a
trace unrolls. So a few layers make thousands of ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bench.models.batches import causal, seeded_generator
from bench.models.hf import TOKENS, hf

_WIDTH, _VOCABULARY = 64, 256
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_KIMI = _HEADS | {
    "num_key_value_heads": 4,
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


_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3NextForCausalLM", _HEADS | {"head_dim": 16} | _DELTA | _EXPERTS),
    "qwen3.5": ("Qwen3_5ForCausalLM", _HEADS | {"head_dim": 16} | _DELTA),
    "kimi-linear": ("KimiLinearForCausalLM", _KIMI),
    "olmo-hybrid": ("OlmoHybridForCausalLM", _HEADS | _DELTA),
    "rwkv": ("RwkvForCausalLM", {"attention_hidden_size": _WIDTH}),
}
NAMES = tuple(_KINDS)


def recurrent(
    name: str, *, num_layers: int, num_tokens: int
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The small model of one of `NAMES` in train mode, and a batch of one sequence with its labels.

    Args:
        name: of the model.
        num_layers: number of layers; the kinds of layers alternate as the model's default says.
        num_tokens: length of the one sequence.
    """
    kind, fields = _KINDS[name]
    length = {"context_length" if name == "rwkv" else "max_position_embeddings": num_tokens}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf(
            kind, num_hidden_layers=num_layers, vocab_size=_VOCABULARY, hidden_size=_WIDTH,
            **TOKENS, **fields, **length,
        )  # fmt: skip
    return model, causal((1, num_tokens), _VOCABULARY)(seeded_generator(0))
