"""Models for the tests: those of the benchmark, tiny and at a size where memory can be measured,
and small ones that are peculiar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from made_of import made_of, mlp
from torch import Tensor, nn
from torch.nn import functional

from bench import models as bench_models
from bench.models import TARGET, Workload, batches
from bench.models.hf import TOKENS, hf, usual

TINY = (
    "gpt2", "llama", "qwen3", "bert-base", "vit-base", "t5-small", "hf-resnet", "resnet50", "mlp",
    "encoder",
)  # fmt: skip
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


def _of(
    name: str,
    model: nn.Module | None = None,
    make_batch: batches.MakeBatch | None = None,
    rows: int = 4,
) -> Workload:
    """A workload of the benchmark, tiny, with another model and other batches."""
    made = tiny(name)
    make = make_batch or batches.causal(64, 512)
    drawn = lambda seed: make(torch.Generator().manual_seed(seed), rows)  # noqa: E731
    return replace(made, model=model.train() if model else made.model, make_batch=drawn)


_DECODER = usual(3, 64, 4, 160, 512) | TOKENS
_DECODER |= {"head_dim": 16, "max_position_embeddings": 64}
_MEDIUM: dict[str, Callable[[], Workload]] = {
    "gpt2": lambda: _of(
        "gpt2",
        hf("GPT2LMHeadModel", n_layer=3, n_embd=64, n_head=4, vocab_size=512, n_positions=64,
           **dict.fromkeys(TOKENS, 0)),
    ),
    "llama": lambda: _of("llama", hf("LlamaForCausalLM", **_DECODER, num_key_value_heads=4)),
    "qwen3": lambda: _of("qwen3", hf("Qwen3ForCausalLM", **_DECODER, num_key_value_heads=2)),
    "bert-base": lambda: _of(
        "bert-base", hf("BertForMaskedLM", **usual(3, 64, 4, 256, 512), pad_token_id=0)
    ),
    "t5-small": lambda: _of(
        "t5-small",
        hf("T5ForConditionalGeneration", num_layers=2, num_decoder_layers=2, d_model=64, d_kv=16,
           d_ff=160, num_heads=4, vocab_size=512, decoder_start_token_id=0),
    ),
    "vit-base": lambda: _of(
        "vit-base",
        hf("ViTForImageClassification", **usual(3, 64, 4, 256), image_size=64, patch_size=8,
           num_labels=10, problem_type="single_label_classification"),
        batches.images(64, 10),
    ),
    "hf-resnet": lambda: _of("hf-resnet", make_batch=batches.images(96, 10)),
    "resnet50": lambda: _of("resnet50", make_batch=batches.images(96, 10, ("x", TARGET))),
    "mlp": lambda: _of("mlp", bench_models.MLP(8, 64), batches.vectors("x", 64), rows=1024),
    "encoder": lambda: _of(
        "encoder",
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 3, enable_nested_tensor=False
        ),
        batches.vectors("src", 64, 64),
    ),
}  # fmt: skip


def step_of(module: nn.Module, workload: Workload, name: str) -> Callable[[], None]:
    """One step with `.grad` in place, the outputs held to the end.

    A loss outside the model adds no bytes of its own.
    """
    batch = workload.make_batch(1)
    inputs = {key: value for key, value in batch.items() if key != TARGET}

    def step() -> None:
        output = module(**inputs)
        if name in HAS_OWN_LOSS:
            output.loss.backward()
        else:
            # the tangent is made inside the step, as a loss would
            output.backward(torch.ones_like(output))
        del output

    return step


# --- small and peculiar ---------------------------------------------------------------------------


class Stack(nn.Module):
    """Linear, GELU and dropout, some times over: the usual small victim."""

    def __init__(self, num_layers: int = 4, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            mlp(width, 4 * width, nn.GELU(), nn.Dropout(dropout)) for _ in range(num_layers)
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


@made_of(lambda make: {"body": Stack(2), "make": make})
class WithOutput(nn.Module):
    """Calls `make(loss, logits, hidden, x)` for its output."""

    def forward(self, x: Tensor) -> object:
        hidden = self.body(x)
        logits = hidden.tanh()
        return self.make(logits.square().mean(), logits, hidden, x)
