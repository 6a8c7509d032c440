"""Models whose loss block is run in chunks, and how far results are from eager's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rockmate.graph.chunking.chunks import Chunks
from rockmate.graph.chunking.region import Refusal
from rockmate.graph.parameters import owner_names
from rockmate.planning.step import CapturedStep
from rockmate.runtime.autograd import Runner
from rockmate.runtime.emit import emit
from rockmate.schedule.schedule import baseline_schedule

FORMS = ("5 recompute", "3 at_once")
_WIDTH, CLASSES, _BATCH, _TOKENS = 16, 61, 2, 11
Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Words to logits by way of one hidden layer, and a loss."""

    def __init__(self, loss: Loss, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, _WIDTH)
        self.hidden = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.words.weight
        self.loss = loss

    def forward(self, words: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        return {"loss": self.loss(self.head(torch.tanh(self.hidden(self.words(words)))), labels)}


def sample(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words, labels = (
        torch.randint(0, CLASSES, (_BATCH, _TOKENS), generator=generator) for _ in range(2)
    )
    labels[0, :4] = -100
    return {"words": words, "labels": labels}


def values_in_01(scores: Tensor) -> Tensor:
    return torch.linspace(0.0, 1.0, scores.numel(), dtype=scores.dtype).view(scores.shape)


def make(loss: Loss, **options: bool) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(loss, **options).train()


def chunked(step: CapturedStep, chunks: str) -> CapturedStep:
    found = step.in_chunks(Chunks.parse(chunks))
    assert not isinstance(found, Refusal), str(found)
    return found


def train(step: CapturedStep, batch: Mapping[str, Tensor], scale: float = 1.0) -> Tensor:
    """One step of the captured graph, nothing recomputed; gives the loss."""
    program = emit(step.graph, baseline_schedule(step.graph), owner_names(step.model))
    outputs = Runner(program, step.model).run(
        [batch[name] for name in sorted(batch)], hooks_last=False
    )
    (outputs[0] * scale).backward()
    return outputs[0].detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


def eager(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    scale: float = 1.0,
    *,
    autocast: torch.dtype | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        loss = model(**batch)["loss"]
    (loss * scale).backward()
    return loss.detach(), gradients(model)


def distance(ours: Tensor, reference: Tensor) -> float:
    """Relative, by norm."""
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def distances(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    assert ours.keys() == reference.keys()
    return {name: distance(gradient, reference[name]) for name, gradient in ours.items()}


def sorted_scores(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.sort(dim=-1).values * values_in_01(scores)).mean()


def check_as_eager(
    step: CapturedStep,
    batch: Mapping[str, Tensor],
    scale: float = 1.0,
    forms: Sequence[str] = FORMS,
) -> None:
    """In chunks: the loss and the gradients of eager's own step."""
    expected, reference = eager(step.model, batch, scale)
    for chunks in forms:
        assert distance(train(chunked(step, chunks), batch, scale), expected) <= 1e-6, chunks
        assert max(distances(gradients(step.model), reference).values()) <= 1e-6, chunks


# --- losses ---


def shifted(scores: Tensor, labels: Tensor) -> Tensor:
    """The last token's logits are left out: tokens of two samples are not side by side."""
    return functional.cross_entropy(
        scores[:, :-1].reshape(-1, scores.shape[-1]), labels[:, 1:].reshape(-1)
    )


def log_probabilities(scores: Tensor, labels: Tensor) -> Tensor:
    chosen = labels.clamp(min=0).unsqueeze(-1)
    return scores.log_softmax(-1).gather(-1, chosen).squeeze(-1) * (labels >= 0)


def selected(scores: Tensor, labels: Tensor) -> Tensor:
    """As TRL's `selective_log_softmax`: the normalisers sample by sample."""
    chosen = scores.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([sample.logsumexp(-1) for sample in scores])


def entropies(scores: Tensor) -> Tensor:
    logarithms = scores.log_softmax(-1)
    return -(logarithms.exp() * logarithms).sum(-1)


def clipped_ratio(scores: Tensor, labels: Tensor) -> Tensor:
    """As in GRPO, of completions: the tokens behind a prompt."""
    found = log_probabilities(scores[:, 3:-1].float(), labels[:, 4:])
    ratio, advantage = (found - found.detach()).exp(), torch.tensor([[0.5], [-1.0]])
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (loss - 0.1 * entropies(scores[:, 3:-1])).mean()
