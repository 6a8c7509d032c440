"""Batches padded to few lengths, for models that are captured for each by itself.

Few captures, inside the budget, eager's numbers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fine_tuning import Record
from helpers import Step, assert_same, differing, one_step, relative_error
from torch import Tensor, nn

from bench import measure
from rockmate import PadToBuckets, RockmateModule, request, wrap_trainer
from rockmate.capture import sample, symbolic

VOCABULARY = 40
LENGTHS = [
    3,
    17,
    20,
    5,
    9,
    1,
    14,
    2,
    19,
    8,
    15,
    6,
    11,
    12,
    4,
    16,
    13,
    7,
    18,
    10,
]  # of 20 batches, no two alike
BUCKETS = [6, 13, 20]


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
        scores = self.head(self.dropout(self.reader(self.embedding(input_ids))[0]))
        return {
            "loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()),
            "logits": scores,
        }


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

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        words = self.embedding(input_ids)
        if attention_mask is not None:
            words = words * attention_mask[..., None]
        states = [words[:, 0]]
        for place in range(1, int(words.shape[1])):
            states.append(torch.tanh(states[-1] * self.decay + words[:, place]))
        logits = self.head(torch.stack(states, 1))
        return {
            "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


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


def padded(lengths: int | Sequence[int] = tuple(BUCKETS), **options: Any) -> PadToBuckets:
    return PadToBuckets(lambda given: dict(given), lengths, adds_mask=False, **options)


# --- training -------------------------------------------------------------------------------------


CAPTURES = {
    Reader: ["capture", "solve", "capture", "capture"],  # one schedule serves all lengths
    Looping: [
        "capture",
        "solve",
        "capture with symbols",
        "capture",
        "solve",
        "capture",
        "solve",
    ],  # each has its own ops
}


@pytest.mark.parametrize("build", [Reader, Looping])
def test_twenty_lengths_take_one_capture_a_bucket_and_keep_the_budget(
    build: type[nn.Module], work: list[str]
) -> None:
    model = build().train()
    eager = copy.deepcopy(model)
    module = RockmateModule(model, budget=0.8)
    collate = padded()
    budget_bytes = 0
    assert len(set(LENGTHS)) == 20
    for seed, length in enumerate(LENGTHS):
        given = collate(batch(length, seed))
        ours, theirs = steps_of(module, model, given, seed), steps_of(eager, eager, given, seed)
        assert_same(ours, theirs)
        budget_bytes = budget_bytes or module.plan.budget_bytes
        assert module.plan.predicted_peak_bytes <= budget_bytes
        model.zero_grad()
        eager.zero_grad()
    assert work == CAPTURES[build]
    for length in BUCKETS:  # memory depends on the shape alone
        given = collate(batch(length))
        module(**given)["loss"].backward()  # .grad is in place from here on
        assert (
            measure.allocator_peak(lambda given=given: module(**given)["loss"].backward())
            <= budget_bytes
        )
    assert work == CAPTURES[build]


@pytest.mark.parametrize("build", [Reader, Looping])
def test_padding_does_not_change_the_loss(build: type[nn.Module]) -> None:
    model = build().eval()
    for length in (1, 5, 6, 11):
        plain, longer = batch(length), padded()(batch(length))
        assert longer["input_ids"].shape[1] > length or length == 6
        assert relative_error(model(**longer)["loss"], model(**plain)["loss"]) <= 1e-6


def steps_of(module: nn.Module, owner: nn.Module, given: dict[str, Tensor], seed: int) -> Step:
    def loss_of(callee: Callable[..., Any], _: int) -> tuple[Any, Tensor]:
        output = callee(**given)
        return output, output["loss"]

    return one_step(module, owner, loss_of, seed)


def test_many_lengths_without_buckets_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    module = RockmateModule(Reader().train(), batch(9), 1.0)
    caplog.clear()
    warned = []
    for length in (8, 7, 6, 7, 5, 4):
        module(**batch(length))
        warned.append(
            sum(
                "pad_to_multiple_of=8 in a Hugging Face data collator" in record.getMessage()
                for record in warnings_of(caplog)
            )
        )
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


# --- Trainer --------------------------------------------------------------------------------------


def pad_to_longest(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    fills = {"input_ids": 0, "labels": -100}
    pad = nn.utils.rnn.pad_sequence
    return {
        name: pad([row[name] for row in rows], batch_first=True, padding_value=fill)
        for name, fill in fills.items()
    }


def trainer_of(
    model: nn.Module, folder: Path, collate: Callable[[Any], Any]
) -> tuple[transformers.Trainer, Record]:
    record = Record()
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        seed=3,
    )
    rows = [
        row(length, length) for length in (2, 3, 3, 5, 4, 9, 1, 4)
    ]  # of four batches only one has the 9
    return transformers.Trainer(
        model=model, args=args, callbacks=[record], train_dataset=rows, data_collator=collate
    ), record


@pytest.mark.filterwarnings("ignore")  # of the trainer
def test_a_trainer_changes_one_line_and_captures_once_a_bucket(
    tmp_path: Path, work: list[str]
) -> None:
    plain, reference = trainer_of(Looping(), tmp_path, PadToBuckets(pad_to_longest, [5, 10]))
    plain.train()
    trainer, record = trainer_of(Looping(), tmp_path, pad_to_longest)
    module = wrap_trainer(trainer, 0.8, buckets=[10, 5])
    trainer.train()
    assert record.logs == reference.logs
    assert len(record.logs) == 5
    assert not differing(module.state_dict(), plain.model.state_dict())
    assert work.count("capture") == 2


def test_a_model_that_cannot_pass_over_padding_is_refused(tmp_path: Path) -> None:
    trainer, _ = trainer_of(Reader(), tmp_path, pad_to_longest)
    with pytest.raises(ValueError, match=r"Reader takes no attention_mask.*adds_mask=False"):
        wrap_trainer(trainer, 0.8, buckets=8)
    assert trainer.data_collator is pad_to_longest


def test_the_trainer_pads_with_the_models_token(tmp_path: Path) -> None:
    model = Looping()
    model.config = transformers.GPT2Config(pad_token_id=7)
    trainer, _ = trainer_of(model, tmp_path, pad_to_longest)
    wrap_trainer(trainer, 0.8, buckets=8)
    assert trainer.data_collator([row(5, 0)])["input_ids"][0, 5:].tolist() == [7, 7, 7]


# --- batches --------------------------------------------------------------------------------------


def test_what_tensors_are_padded_with() -> None:
    given = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "token_type_ids": torch.tensor([[0, 1, 1]]),
        "labels": torch.tensor([[1, 2, 3]]),
        "weights": torch.tensor([[0.5, 0.5, 0.5]]),
        "decoder_input_ids": torch.tensor([[4, 4, 4, 4, 4]]),
        "kinds": torch.tensor([1]),
        "pixel_values": torch.zeros(1, 2, 2),
        "text": ["abc"],
    }
    made = PadToBuckets(lambda rows: dict(rows), 4, pad_token_id=9, padding={"weights": -1.5})(
        given
    )
    assert made["input_ids"].tolist() == [[5, 6, 7, 9]]
    assert made["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert made["token_type_ids"].tolist() == [[0, 1, 1, 0]]
    assert made["labels"].tolist() == [[1, 2, 3, -100]]
    assert made["weights"].tolist() == [[0.5, 0.5, 0.5, -1.5]]
    assert made["decoder_input_ids"].tolist() == [[4, 4, 4, 4, 4, 9, 9, 9]]
    assert all(made[name] is given[name] for name in ("kinds", "pixel_values", "text"))


def test_the_mask_of_the_collator_and_other_dimensions_stay() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    given = {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "attention_mask": mask,
        "labels": torch.ones(2, 5),
    }
    made = PadToBuckets(lambda rows: dict(rows), [5, 4])(given)  # the first batch takes the longest
    assert made["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]]
    assert made["labels"] is given["labels"]  # numbers for classes, not for tokens
    bias = PadToBuckets(lambda rows: dict(rows), 4, padding={"bias": 0})(
        {"bias": torch.ones(1, 3, 6)}
    )["bias"]
    assert bias.shape == (1, 4, 6)
    assert bias[:, 3].count_nonzero() == 0


def test_the_first_batch_is_as_long_as_any_to_come() -> None:
    collate = padded([4, 12])
    assert [collate(batch(length))["input_ids"].shape[1] for length in (2, 2, 4, 5)] == [
        12,
        4,
        4,
        12,
    ]
    collate = padded(4)
    assert [collate(batch(length))["input_ids"].shape[1] for length in (2, 4, 5)] == [4, 4, 8]


def test_what_cannot_be_padded_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"input_ids has 25 tokens, more than the largest of the lengths \[8, 16\]"
    ):
        padded([16, 8])(batch(25))
    given = {**batch(6), "depth": torch.zeros(3, 6)}
    with pytest.raises(
        ValueError, match=r"depth is as long as input_ids \(6 tokens\).*padding=\{'depth': 0\}"
    ):
        padded()(given)
    assert padded(padding={"depth": None})(given)["depth"] is given["depth"]
    with pytest.raises(TypeError, match="the data collator made a tuple"):
        PadToBuckets(tuple, 8)([1])
    for lengths in (0, [], [8, -1]):
        with pytest.raises(ValueError, match="give the lengths in tokens"):
            padded(lengths)
