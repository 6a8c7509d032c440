"""Batches padded to few lengths, for models that are captured for each by itself.

Few captures, inside the budget, eager's numbers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import Step, assert_same, one_step
from torch import Tensor, nn

from bench import measure
from rockmate import RockmateModule
from rockmate.capture import sample, symbolic
from rockmate.entry import request

VOCABULARY = 40
LENGTHS = [20, 3, 17, 5, 9, 1, 14, 2, 19, 8, 15, 6, 11, 12, 4, 16, 13, 7, 18, 10]  # no two alike
MULTIPLE, PADDED_LENGTHS = 7, [7, 14, 21]


def judged(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return {"loss": loss, "logits": logits}


class Reader(nn.Module):
    """A score for the next word, from a recurrent layer over the words so far, which runs as it
    is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.reader = nn.GRU(16, 16, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, VOCABULARY))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return judged(self.head(self.dropout(self.reader(self.embedding(input_ids))[0])), labels)


class Looping(nn.Module):
    """A word's kind, from the words so far.

    A loop over the words, so that each length makes another graph.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.decay = nn.Parameter(torch.rand(16))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        words = self.embedding(input_ids)
        states = [words[:, 0]]
        for place in range(1, int(words.shape[1])):
            states.append(torch.tanh(states[-1] * self.decay + words[:, place]))
        return judged(self.head(torch.stack(states, 1)), labels)


def row(length: int, seed: int) -> dict[str, Tensor]:
    words = torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": words, "labels": words.roll(-1)}


def batch(length: int, seed: int = 0) -> dict[str, Tensor]:
    return torch.utils.data.default_collate([row(length, 10 * seed + index) for index in range(3)])


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Captures that were made and schedules that were solved for, in order."""
    done: list[str] = []

    def counting(place: Any, name: str, label: str) -> None:
        function: Callable[..., Any] = getattr(place, name)
        monkeypatch.setattr(
            place, name, lambda *args, **kwargs: done.append(label) or function(*args, **kwargs)
        )

    counting(sample, "capture_joint", "capture")
    counting(symbolic, "capture_joint", "capture with symbols")
    counting(request.PlanRequest, "_session_call", "solve")
    return done


def padded(given: dict[str, Tensor], multiple: int = MULTIPLE) -> dict[str, Tensor]:
    """A batch that is padded as by a collator with `pad_to_multiple_of`."""
    missing = -given["labels"].shape[1] % multiple
    fills = {"input_ids": 0, "labels": -100}
    return {
        name: nn.functional.pad(given[name], (0, missing), value=fill)
        for name, fill in fills.items()
    }


# --- training -------------------------------------------------------------------------------------


CAPTURES = {
    Reader: ["capture", "solve", "capture", "capture"],  # one schedule serves all lengths
    # each has its own ops
    Looping: ["capture", "solve", "capture with symbols", "capture", "solve", "capture", "solve"],
}


@pytest.mark.parametrize("build", [Reader, Looping])
def test_twenty_lengths_take_one_capture_a_multiple_and_keep_the_budget(
    build: type[nn.Module], work: list[str]
) -> None:
    model = build().train()
    eager = copy.deepcopy(model)
    module = RockmateModule(model, budget=0.8)
    budget_bytes = 0
    assert len(set(LENGTHS)) == 20
    for seed, length in enumerate(LENGTHS):
        given = padded(batch(length, seed))
        ours, theirs = steps_of(module, model, given, seed), steps_of(eager, eager, given, seed)
        assert_same(ours, theirs)
        budget_bytes = budget_bytes or module.plan.budget_bytes
        assert module.plan.predicted_peak_bytes <= budget_bytes
        model.zero_grad()
        eager.zero_grad()
    assert work == CAPTURES[build]
    for length in PADDED_LENGTHS:  # memory depends on the shape alone
        given = padded(batch(length))
        module(**given)["loss"].backward()  # .grad is in place from here on
        peak_bytes = measure.allocator_peak(lambda x=given: module(**x)["loss"].backward())
        assert peak_bytes <= budget_bytes
    assert work == CAPTURES[build]


def steps_of(module: nn.Module, owner: nn.Module, given: dict[str, Tensor], seed: int) -> Step:
    def loss_of(callee: Callable[..., Any], _: int) -> tuple[Any, Tensor]:
        output = callee(**given)
        return output, output["loss"]

    return one_step(module, owner, loss_of, seed)


def test_many_lengths_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    module = RockmateModule(Reader().train(), batch(9), 1.0)
    caplog.clear()
    warned = []
    for length in (8, 7, 6, 7, 5, 4):
        module(**batch(length))
        advice = "pad_to_multiple_of=8 in a Hugging Face data collator"
        warned.append(sum(advice in record.getMessage() for record in warnings_of(caplog)))
    assert warned == [0, 0, 0, 0, 1, 1]


def test_one_capture_for_all_lengths_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Tanh(), nn.Linear(8, 1)).train()
    module = RockmateModule(model, batch(9)["input_ids"], 1.0)
    for length in (8, 7, 6, 5, 4):
        module(batch(length)["input_ids"])
    assert not warnings_of(caplog)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [
        record
        for record in caplog.records
        if record.name.startswith("rockmate") and record.levelno >= logging.WARNING
    ]
