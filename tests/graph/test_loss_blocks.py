"""Log-probabilities, entropies and divergences in chunks, of one model or of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from chunk_cases import (
    CLASSES,
    FORMS,
    Loss,
    check_as_eager,
    chunked,
    distances,
    entropies,
    gradients,
    log_probabilities,
    make,
    sample,
    selected,
)
from torch import Tensor, nn
from torch.nn import functional

from rockmate.graph.chunking.chunks import Chunks
from rockmate.graph.chunking.region import Refusal
from rockmate.graph.parameters import owner_names
from rockmate.runtime.autograd import Runner
from rockmate.runtime.emit import emit
from rockmate.schedule.schedule import baseline_schedule
from rockmate.step import capture_step


def of_sequences(values: Tensor) -> Tensor:
    """The first sample preferred to the second, as in DPO: no sum over tokens."""
    first, second = values.sum(-1)
    return -functional.logsigmoid(first - second)


# Losses that are no sums over rows: they have no chunks at once.
PREFERENCES: Mapping[str, Loss] = {
    "log probabilities": lambda *args: of_sequences(log_probabilities(*args)),
    "shifted": lambda scores, labels: of_sequences(
        log_probabilities(scores[:, :-1] / 0.7, labels[:, 1:])
    ),
    "selected": lambda *args: of_sequences(selected(*args)),
    "entropy": lambda scores, _: of_sequences(entropies(scores)),
}


@pytest.mark.parametrize("loss", PREFERENCES)
def test_losses_of_sequences(loss: str) -> None:
    step = capture_step(make(PREFERENCES[loss]), sample())
    check_as_eager(step, sample(), scale=3.0, forms=FORMS[:1])
    assert isinstance(step.in_chunks(Chunks.parse(FORMS[1])), Refusal)


class TwoModels(nn.Module):
    """A policy and a frozen reference, each with a head."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.policy, self.reference = make(selected), make(selected)
        self.reference.requires_grad_(False)
        self.loss = loss

    def forward(self, words: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        def scores(model: Any, rows: slice) -> Tensor:
            return model.head(torch.tanh(model.hidden(model.words(words[rows]))))

        return {"loss": self.loss(self.policy, self.reference, scores, labels)}


def preference(policy: nn.Module, reference: nn.Module, scores: Any, labels: Tensor) -> Tensor:
    """DPO: four calls of two models."""
    with torch.no_grad():
        of_reference = [
            log_probabilities(scores(reference, rows), labels[rows]).sum()
            for rows in (slice(0, 1), slice(1, 2))
        ]
    chosen, rejected = (
        log_probabilities(scores(policy, rows), labels[rows]).sum()
        for rows in (slice(0, 1), slice(1, 2))
    )
    return -functional.logsigmoid(chosen - rejected - of_reference[0] + of_reference[1])


def divergence(policy: nn.Module, reference: nn.Module, scores: Any, labels: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = (scores(reference, slice(None)) / 2).log_softmax(-1)
    student = scores(policy, slice(None)).log_softmax(-1)
    return functional.kl_div(student, teacher, log_target=True, reduction="batchmean")


@pytest.mark.parametrize(("loss", "number"), [(preference, 4), (divergence, 2)])
def test_all_heads_run_in_chunks(loss: Callable[..., Tensor], number: int) -> None:
    step = capture_step(TwoModels(loss), sample())
    check_as_eager(step, sample(), scale=3.0, forms=FORMS[:1])
    softmaxes = [
        op.node.meta["val"].numel()
        for op in chunked(step, FORMS[0]).graph.ops
        if op.node.target is torch.ops.aten._log_softmax.default
    ]
    assert len(softmaxes) == 5 * number
    assert max(softmaxes) == (3 if number == 4 else 5) * CLASSES


def test_log_probabilities_as_outputs() -> None:
    """The loss is outside of the step: chunks of the forward and of the backward."""

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make(selected)

        def forward(self, words: Tensor, labels: Tensor) -> Tensor:
            model = self.inner
            scores = model.head(torch.tanh(model.hidden(model.words(words))))
            return log_probabilities(scores, labels)

    model = Scored()
    step = chunked(capture_step(model, sample()), FORMS[0])
    program = emit(step.graph, baseline_schedule(step.graph), owner_names(model))
    batch = sample()
    found = []
    for run in (
        lambda: Runner(program, model).run([batch["labels"], batch["words"]], hooks_last=False)[0],
        lambda: model(**batch),
    ):
        of_sequences(run()).backward()
        found.append(gradients(model))
    assert max(distances(*found).values()) <= 1e-6
