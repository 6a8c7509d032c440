"""The steps of `rockmate check`: one small model for each way in which a step is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rockmate.extras import require

Built = tuple[nn.Module, Any]
"""A model in training mode, and its sample input."""

_NUM_ROWS, _NUM_TOKENS = 4, 64
_VOCABULARY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step.

    Attributes:
        name: as the table shows it.
        build: makes the model and its sample on the CPU, in single precision.
        budget: a fraction of the peak without recomputation.
        options: of `RockmateModule`.
        autocast: whether the forward runs in bfloat16 under autocast.
        saves: whether the plan goes through a file.
        is_bitwise: whether gradients equal eager's bit for bit on a CPU; else they are as near to
            those in double precision as eager's.
        is_random: whether the model draws, so that double precision tells nothing of it.
    """

    name: str
    build: Callable[[], Built]
    budget: float = 0.5
    options: Mapping[str, Any] = field(default_factory=dict)
    autocast: bool = False
    saves: bool = False
    is_bitwise: bool = True
    is_random: bool = False


class _Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, states: Tensor) -> Tensor:
        normal = self.first_norm(states)
        states = states + self.attention(normal, normal, normal, need_weights=False)[0]
        return states + self.mlp(self.second_norm(states))


class _LanguageModel(nn.Module):
    def __init__(self, *, vocabulary: int = _VOCABULARY, dropout: float = 0.0) -> None:
        super().__init__()
        width = 128
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(_Block(width, dropout) for _ in range(3)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens)))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class _Bottleneck(nn.Module):
    """A residual block with batch norms, as in ResNet-50."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width // 4
        self.layers = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(images + self.layers(images))


class _ImageModel(nn.Module):
    """A residual net of images in channels last, with a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(_Bottleneck(64) for _ in range(4)), nn.GroupNorm(8, 64))
        self.head = nn.Linear(64, 10)
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.blocks(self.stem(images)).mean((2, 3))
        return functional.cross_entropy(self.head(features), labels)


class InBfloat16(nn.Module):
    """A model whose forward runs under autocast."""

    def __init__(self, model: nn.Module) -> None:
        """Of this model."""
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        device = next(self.model.parameters()).device
        with torch.autocast(device.type, torch.bfloat16):
            return self.model(*args, **kwargs)


def _language_model(vocabulary: int = _VOCABULARY, dropout: float = 0.0) -> Built:
    model = _LanguageModel(vocabulary=vocabulary, dropout=dropout)
    return model, torch.randint(vocabulary, (_NUM_ROWS, _NUM_TOKENS))


def _images() -> Built:
    images = torch.randn(8, 3, 32, 32).to(memory_format=torch.channels_last)
    return _ImageModel(), (images, torch.randint(10, (8,)))


def _gpt2() -> Built:
    transformers = require("transformers", extra="hf", purpose="GPT-2")
    config = transformers.GPT2Config(
        n_layer=3, n_embd=128, n_head=4, n_positions=_NUM_TOKENS,
        vocab_size=_VOCABULARY, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _with_tokens(transformers.GPT2LMHeadModel(config))


def _llama_with_lora() -> Built:
    transformers = require("transformers", extra="hf", purpose="Llama")
    peft = require("peft", extra="hf", purpose="LoRA")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=_NUM_TOKENS, vocab_size=_VOCABULARY,
    )  # fmt: skip
    adapters = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return _with_tokens(peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters))


def _with_tokens(model: nn.Module) -> Built:
    tokens = torch.randint(_VOCABULARY, (_NUM_ROWS, _NUM_TOKENS))
    return model, {"input_ids": tokens, "labels": tokens}


_LEAST = {"on_infeasible": "least", "numerics": "bitwise"}


def tiny_case() -> Case:
    """One step of a second: convolution, norms, dropout and attention, within a tight budget."""
    images = torch.randn(4, 3, 10, 10).to(memory_format=torch.channels_last)
    return Case(name="tiny", build=lambda: (_Tiny(), images), budget=0.8, is_random=True)


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU())
        self.stem.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.block = _Block(16, 0.1)

    def forward(self, images: Tensor) -> Tensor:
        return self.block(self.stem(images).flatten(2).transpose(1, 2)).square().mean()


def cases(device: torch.device, folder: str) -> tuple[Case, ...]:
    """The steps for a device; values of a CPU move to the folder."""
    tier = f"disk:{folder}" if device.type == "cpu" else "host"
    dropped = partial(_language_model, dropout=0.1)
    large = partial(_language_model, vocabulary=8 * _VOCABULARY)
    fused = {"kernels": "fused"}
    moved = {"offload": tier}
    return (
        Case(name="GPT-2", build=_gpt2, is_random=True),
        Case(name="Llama with LoRA", build=_llama_with_lora),
        Case(name="ResNet, channels last", build=_images),
        Case(name="dropout", build=dropped, is_random=True),
        Case(name="smallest budgets", build=_language_model, budget=0.01, options=_LEAST),
        Case(name="bf16 autocast", build=_language_model, autocast=True),
        Case(name="fused kernels", build=_language_model, options=fused, is_bitwise=False),
        Case(name="loss in chunks", build=large, budget=0.3, is_bitwise=False),
        Case(name="frames", build=dropped, budget=0.7, options={"mode": "frames"}, is_random=True),
        Case(name="a saved plan", build=_language_model, saves=True),
        Case(name=f"moves ({tier.partition(':')[0]})", build=_language_model, options=moved),
    )
