"""Models for the tests: those of the benchmark, tiny and at a size where memory can be measured,
and small ones that are peculiar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from bench import models as bench_models
from bench.models import TARGET, Batch, Workload

TINY = (
    "gpt2",
    "llama",
    "qwen3",
    "bert-base",
    "vit-base",
    "t5-small",
    "hf-resnet",
    "resnet50",
    "mlp",
    "encoder",
)
"""Every architecture that must work, by its name in the benchmark."""

HAS_OWN_LOSS = frozenset(
    {"gpt2", "llama", "qwen3", "bert-base", "vit-base", "t5-small", "hf-resnet"}
)
HAS_DROPOUT = frozenset({"gpt2", "bert-base", "t5-small", "encoder"})
SUMS_IN_ANOTHER_ORDER = frozenset({"t5-small"})
"""Where one weight has three uses, so that the order in which its gradients are added shows in the
last bit."""


def tiny(name: str) -> Workload:
    return bench_models.build(name, tiny=True)


# --- at a size where some kB do not matter --------------------------------------------------------


def medium(name: str) -> Workload:
    """The architecture with some MB of activations."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _MEDIUM[name]()


def _words(seed: int, *, shape: tuple[int, int]) -> Batch:
    words = torch.randint(3, 512, shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": words, "labels": words.clone()}


def _gpt2() -> Workload:
    config = transformers.GPT2Config(
        n_layer=3,
        n_embd=64,
        n_head=4,
        vocab_size=512,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return replace(tiny("gpt2"), model=model.train(), make_batch=partial(_words, shape=(4, 64)))


def _llama() -> Workload:
    config = transformers.LlamaConfig(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=160,
        vocab_size=512,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
    )
    return replace(
        tiny("llama"),
        model=transformers.LlamaForCausalLM(config).train(),
        make_batch=partial(_words, shape=(4, 64)),
    )


def _qwen3() -> Workload:
    config = transformers.Qwen3Config(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=160,
        vocab_size=512,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
    )
    return replace(
        tiny("qwen3"),
        model=transformers.Qwen3ForCausalLM(config).train(),
        make_batch=partial(_words, shape=(4, 64)),
    )


def _bert() -> Workload:
    config = transformers.BertConfig(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=256,
        vocab_size=512,
        pad_token_id=0,
    )
    return replace(
        tiny("bert-base"),
        model=transformers.BertForMaskedLM(config).train(),
        make_batch=partial(_words, shape=(4, 64)),
    )


def _t5() -> Workload:
    config = transformers.T5Config(
        num_layers=2,
        num_decoder_layers=2,
        d_model=64,
        d_kv=16,
        d_ff=160,
        num_heads=4,
        vocab_size=512,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    return replace(
        tiny("t5-small"),
        model=transformers.T5ForConditionalGeneration(config).train(),
        make_batch=partial(_words, shape=(4, 64)),
    )


def _pictures(seed: int, *, batch: int, pixels: int, names: tuple[str, str]) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        names[0]: torch.randn(batch, 3, pixels, pixels, generator=generator),
        names[1]: torch.randint(0, 10, (batch,), generator=generator),
    }


def _vit() -> Workload:
    config = transformers.ViTConfig(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=64,
        patch_size=8,
        num_labels=10,
        problem_type="single_label_classification",
    )
    pictures = partial(_pictures, batch=4, pixels=64, names=("pixel_values", "labels"))
    return replace(
        tiny("vit-base"),
        model=transformers.ViTForImageClassification(config).train(),
        make_batch=pictures,
    )


def _hf_resnet() -> Workload:
    pictures = partial(_pictures, batch=4, pixels=96, names=("pixel_values", "labels"))
    return replace(tiny("hf-resnet"), make_batch=pictures)


def _resnet() -> Workload:
    return replace(
        tiny("resnet50"), make_batch=partial(_pictures, batch=4, pixels=96, names=("x", TARGET))
    )


def _vectors(seed: int, *, shape: tuple[int, ...], name: str) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator),
        TARGET: torch.randn(shape, generator=generator),
    }


def _mlp() -> Workload:
    return replace(
        tiny("mlp"),
        model=bench_models.MLP(8, 64).train(),
        make_batch=partial(_vectors, shape=(1024, 64), name="x"),
    )


def _encoder() -> Workload:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return replace(
        tiny("encoder"),
        model=model.train(),
        make_batch=partial(_vectors, shape=(4, 64, 64), name="src"),
    )


_MEDIUM: dict[str, Callable[[], Workload]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen3": _qwen3,
    "bert-base": _bert,
    "t5-small": _t5,
    "vit-base": _vit,
    "hf-resnet": _hf_resnet,
    "resnet50": _resnet,
    "mlp": _mlp,
    "encoder": _encoder,
}


# --- small and peculiar ---------------------------------------------------------------------------


class Stack(nn.Module):
    """Linear, GELU and dropout, some times over: the usual small victim."""

    def __init__(self, num_layers: int = 4, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(4 * width, width),
            )
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class TiedLanguageModel(nn.Module):
    """Embedding and head share a weight; the loss is inside, outputs are a dict."""

    def __init__(self, vocabulary: int = 23, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = Stack(3, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.body(self.embedding(words)))
        if labels is None:
            return {"logits": logits}
        return {
            "loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank adapter beside it, as LoRA has it."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


class BatchNormNet(nn.Module):
    """Convolutions with batch normalisation, one of them without affine parameters, one without
    running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8, affine=False)
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(8, track_running_stats=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = x + functional.relu(self.bn2(self.conv2(x)))
        x = x + functional.relu(self.bn3(self.conv3(x)))
        return self.head(x.mean((2, 3)))


@dataclass
class PlainOutput:
    """A dataclass that no pytree knows."""

    loss: Tensor
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    note: str = ""


class WithOutput(nn.Module):
    """Calls `make(loss, logits, hidden, x)` for its output."""

    def __init__(self, make: Callable[..., object]) -> None:
        super().__init__()
        self.body = Stack()
        self.make = make

    def forward(self, x: Tensor) -> object:
        hidden = self.body(x)
        logits = hidden.tanh()
        return self.make(logits.square().mean(), logits, hidden, x)
