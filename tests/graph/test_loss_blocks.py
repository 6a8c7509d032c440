"""Log-probabilities, entropies and divergences in chunks, of one model or of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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
from rockmate.planning.chunkable_blocks import ChunkableBlocks
from rockmate.planning.step import capture_step
from rockmate.runtime.autograd import Runner
from rockmate.runtime.emit import emit
from rockmate.schedule.schedule import baseline_schedule


def of_sequences(values: Tensor) -> Tensor:
    """The first sample preferred to the second, as in DPO: no sum over tokens."""
    first, second = values.sum(-1)
    return -functional.logsigmoid(first - second)


# Losses that are no sums over rows: they have no chunks at once.
PREFERENCES: Mapping[str, Loss] = {
    "shifted": lambda scores, labels: of_sequences(
        log_probabilities(scores[:, :-1] / 0.7, labels[:, 1:])
    ),
    "selected": lambda *args: of_sequences(selected(*args)),
    "by sample": lambda scores, labels: of_sequences(
        torch.stack([log_probabilities(scores[at], labels[at]) for at in range(len(labels))])
    ),
}


@pytest.mark.parametrize("loss", PREFERENCES)
def test_losses_of_sequences(loss: str) -> None:
    step = capture_step(make(PREFERENCES[loss]), sample())
    check_as_eager(step, sample(), scale=3.0, forms=FORMS[:1])
    assert isinstance(step.in_chunks(Chunks.parse(FORMS[1])), Refusal)


def test_rows_of_a_slice_count_with_their_copies() -> None:
    """Two chunks of at least 8 rows: 10 tokens of each of two samples."""
    step = capture_step(make(PREFERENCES["shifted"]), sample())
    blocks = ChunkableBlocks(step, 1, numerics="any_order")
    assert not blocks.loss_refusal
    assert [each.number for each in blocks.chunkings[-1]] == [2]


class TwoModels(nn.Module):
    """A policy and a frozen reference, each with a head."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.policy, self.reference = make(selected), make(selected).requires_grad_(False)
        self.loss = loss

    def forward(self, words: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        def scores(model: Any, rows: slice) -> Tensor:
            return model.head(torch.tanh(model.hidden(model.words(words[rows]))))

        def of_reference(rows: slice) -> Tensor:
            with torch.no_grad():
                return scores(self.reference, rows)

        return {"loss": self.loss(partial(scores, self.policy), of_reference, labels)}


_ALL, _FIRST, _SECOND = slice(None), slice(0, 1), slice(1, 2)


def preference(policy: Any, reference: Any, labels: Tensor) -> Tensor:
    """DPO: four calls of two models."""
    ratios = [
        (
            log_probabilities(policy(rows), labels[rows])
            - log_probabilities(reference(rows), labels[rows])
        ).sum()
        for rows in (_FIRST, _SECOND)
    ]
    return -functional.logsigmoid(ratios[0] - ratios[1])


def divergence(policy: Any, reference: Any, labels: Tensor) -> Tensor:
    """Distillation: the chunks of both heads together."""
    teacher, student = (reference(_ALL) / 2).log_softmax(-1), policy(_ALL).log_softmax(-1)
    return functional.kl_div(student, teacher, log_target=True, reduction="batchmean")


@pytest.mark.parametrize(("loss", "number", "rows"), [(preference, 4, 3), (divergence, 2, 5)])
def test_all_heads_run_in_chunks(loss: Callable[..., Tensor], number: int, rows: int) -> None:
    step = capture_step(TwoModels(loss), sample())
    check_as_eager(step, sample(), scale=3.0, forms=FORMS[:1])
    softmaxes = [
        op.node.meta["val"].numel()
        for op in chunked(step, FORMS[0]).graph.ops
        if op.node.target is torch.ops.aten._log_softmax.default
    ]
    assert (len(softmaxes), max(softmaxes)) == (5 * number, rows * CLASSES)


def test_log_probabilities_as_outputs() -> None:
    """The loss is outside of the step: chunks of the forward and of the backward."""
    model = TwoModels(lambda policy, _, labels: log_probabilities(policy(_ALL), labels))
    step = chunked(capture_step(model, sample()), FORMS[0])
    program = emit(step.graph, baseline_schedule(step.graph), owner_names(model))
    run = Runner(program, model).run([sample()["labels"], sample()["words"]], hooks_last=False)
    of_sequences(run[0]).backward()
    found = gradients(model)
    of_sequences(model(**sample())["loss"]).backward()
    assert max(distances(found, gradients(model)).values()) <= 1e-6
