"""Hugging Face Trainer and accelerate with a planned module.

The plain model's run, number for number.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import transformers
from fine_tuning import BATCH, Sentences, batch, llama, trained, trainer
from helpers import assert_alike, differing, gradients_of
from torch import Tensor, nn

from rockmate import InfeasibleBudgetError, PlannedStep, RockmateError, RockmateModule, wrap_trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainer and of accelerate


def plain(model: nn.Module) -> nn.Module:
    return model


def planned(model: nn.Module) -> nn.Module:
    return RockmateModule(model, budget=0.6)


def sum_of_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    loss = nn.functional.cross_entropy(
        outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    return loss / (num_items_in_batch if num_items_in_batch is not None else labels.numel())


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "gradient_accumulation_steps": 3,
            "max_grad_norm": 0.05,
            "eval_strategy": "epoch",
            "label_names": ["labels"],
        },
        {
            "compute_loss_func": sum_of_tokens,
            "gradient_accumulation_steps": 2,
            "optim": "adafactor",
        },
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_trains_as_the_plain_model(arguments: dict[str, Any], tmp_path: Path) -> None:
    logs, reference = trained(llama, plain, tmp_path, **dict(arguments))
    our_logs, model = trained(llama, planned, tmp_path, **dict(arguments))
    assert len(logs) >= 2
    assert our_logs == logs
    assert not differing(model.state_dict(), reference.state_dict())


def test_loads_the_best_model(tmp_path: Path) -> None:
    options = {
        "num_train_epochs": 2,
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "load_best_model_at_end": True,
    }
    options |= {"learning_rate": 0.5}  # so large that the first epoch is the better one
    states = []
    for wrap in (plain, planned):
        model = llama()
        worker, record = trainer(wrap(model), tmp_path / wrap.__name__, **options)
        worker.train()
        best = worker.state.best_model_checkpoint.split("-")[-1]
        states.append((worker.state.best_metric, best, record.logs, model.state_dict()))
    assert states[0][:3] == states[1][:3]
    assert not differing(states[1][3], states[0][3])


def test_evaluation_and_prediction(tmp_path: Path) -> None:
    found = []
    for wrap in (plain, planned):
        worker, _ = trainer(wrap(llama()), tmp_path)
        predictions = worker.predict(Sentences(8)).predictions
        found.append((worker.evaluate()["eval_loss"], torch.as_tensor(predictions)))
    assert_alike(*found)


def test_columns_and_labels_are_those_of_the_model(tmp_path: Path) -> None:
    ours, reference = trainer(planned(llama()), tmp_path)[0], trainer(llama(), tmp_path)[0]
    for worker in (ours, reference):
        worker._set_signature_columns_if_needed()
    assert ours._signature_columns == reference._signature_columns
    assert ours.label_names == reference.label_names == ["labels"]
    assert ours.model_accepts_loss_kwargs is reference.model_accepts_loss_kwargs is True


def test_wrap_trainer(tmp_path: Path) -> None:
    logs, reference = trained(llama, plain, tmp_path)
    model = llama()
    worker, record = trainer(model, tmp_path)
    module = wrap_trainer(worker, 0.6)
    with pytest.raises(RockmateError, match="nothing is planned yet"):
        module.plan  # noqa: B018
    worker.train()
    assert worker.model is module
    assert module.plan.schedule.num_recomputations() > 0
    assert record.logs == logs
    assert not differing(model.state_dict(), reference.state_dict())


class OwnLoss(transformers.Trainer):
    """Computes its loss from the scores, and leaves that of the model unused."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **others: Any
    ) -> Any:
        outputs = model(**inputs)
        loss = sum_of_tokens(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


def test_wrap_trainer_plans_for_the_loss_alone_where_nothing_else_is_read(tmp_path: Path) -> None:
    """The same numbers with a smaller peak; evaluation has all outputs."""
    peaks = {}
    for outputs in (None, "all"):
        made, _ = trainer(llama(), tmp_path)
        options = {} if outputs is None else {"outputs": outputs}
        module = wrap_trainer(made, 1.0, **options)
        made.train()
        peaks[outputs] = module.plan.baseline_peak_bytes
        assert module.plan.options.outputs == (outputs or "loss")
        assert made.predict(made.eval_dataset).predictions is not None
    assert peaks[None] < peaks["all"]


def test_wrap_trainer_keeps_outputs_that_are_read(tmp_path: Path) -> None:
    """By a method of the object, a label smoother, a loss function, a hook."""

    def own_loss(made: transformers.Trainer) -> None:
        def compute_loss(model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return model(**inputs).logits.square().mean()

        made.compute_loss = compute_loss

    def hooked(made: transformers.Trainer) -> None:
        made.model.register_forward_hook(lambda _, __, outputs: seen.append(outputs.logits.shape))

    seen: list[torch.Size] = []
    cases: list[tuple[Any, dict[str, Any]]] = [
        (own_loss, {}),
        (hooked, {}),
        (None, {"label_smoothing_factor": 0.1}),
        (None, {"compute_loss_func": lambda outputs, *_, **__: outputs.logits.square().mean()}),
    ]
    for prepare, arguments in cases:
        found = []
        for budget in (None, 1.0):
            made, record = trainer(llama(attention_dropout=0.0), tmp_path, max_steps=2, **arguments)
            if prepare is not None:
                prepare(made)
            step = None if budget is None else wrap_trainer(made, budget)
            made.train()
            assert step is None or step.is_planned
            found.append([step for step in record.logs if "loss" in step])
        assert found[0] == found[1]
    assert len(seen) >= 4


class RowsOfLengths(torch.utils.data.Dataset):
    """Rows of different lengths. To read one draws random numbers of all kinds."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        draws = (torch.rand(1), random.random(), np.random.rand())
        assert len(draws) == 3
        words = [(index + place) % 60 + 2 for place in range(self.lengths[index])]
        return {"input_ids": words, "labels": words}


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    words = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {"input_ids": torch.tensor(words), "labels": torch.tensor(words)}


def test_wrap_trainer_plans_for_the_longest_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes last, and no batch needs another plan; the numbers are the plain run's."""
    lengths = [*[5, 6, 7, 8] * 3, *[12, 16, 9, 9]]
    found = []
    for budget in (None, 1.0):
        made, record = trainer(
            llama(attention_dropout=0.0),
            tmp_path,
            train_dataset=RowsOfLengths(lengths),
            train_sampling_strategy="sequential",
        )
        made.data_collator = padded
        module = None if budget is None else wrap_trainer(made, budget)
        made.train()
        found.append([step for step in record.logs if "loss" in step])
    assert found[0] == found[1]
    assert module is not None
    planned = [each.message for each in caplog.records if "planned for this call" in each.message]
    assert len(planned) == 1
    assert "first training call" in planned[0]


def test_a_training_set_that_cannot_be_read_here_is_planned_for_its_first_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Forbidden(Sentences):
        begun = 0

        def __getitem__(self, index: int) -> Any:
            self.begun += 1
            if self.begun == 2 * BATCH + 1:
                msg = "not here"
                raise OSError(msg)
            return super().__getitem__(index)

    made, _ = trainer(llama(), tmp_path, train_dataset=Forbidden())
    module = wrap_trainer(made, 1.0)
    made.train()
    assert module.is_planned
    assert "longest rows of the training set cannot be read here: OSError: not here" in caplog.text


def test_wrap_trainer_goes_on_where_no_schedule_fits(tmp_path: Path) -> None:
    made, _ = trainer(llama(), tmp_path)
    module = wrap_trainer(made, "1KiB")
    made.train()
    assert module.plan.budget_bytes > 1024
    strict, _ = trainer(llama(), tmp_path)
    wrap_trainer(strict, "1KiB", on_infeasible="error")
    with pytest.raises(InfeasibleBudgetError):
        strict.train()


@pytest.mark.parametrize("bf16", [False, True])
def test_wrap_trainer_of_a_trainer_that_computes_its_loss_itself(
    tmp_path: Path, *, bf16: bool
) -> None:
    found = []
    for wrap in (lambda worker: None, lambda worker: wrap_trainer(worker, 0.7)):
        model = llama()
        plain_worker, record = trainer(model, tmp_path, bf16=bf16)
        worker = OwnLoss(
            model, plain_worker.args, train_dataset=plain_worker.train_dataset, callbacks=[record]
        )
        step = wrap(worker)
        worker.train()
        found.append((record.logs, model.state_dict()))
    assert isinstance(step, PlannedStep)
    assert step.is_planned
    assert len(found[0][0]) > 1
    assert found[0][0] == found[1][0]
    assert not differing(found[0][1], found[1][1])


def test_a_forward_that_bypasses_the_plan_is_refused() -> None:
    """TRL replaces the forward of the model that it is given, and its own calls the layers."""
    module = RockmateModule(llama(), budget=0.9)
    of_wrapper = module.forward
    module.forward = lambda **inputs: of_wrapper(**inputs)  # as accelerate does
    module(**batch()).loss.backward()
    assert module.is_planned
    module.forward = lambda **inputs: module.original(**inputs)
    with pytest.raises(RockmateError, match=r"forward was replaced .*wrap_trainer"):
        module(**batch())
    with torch.no_grad():
        assert module(**batch()).loss > 0
    assert module.eval()(**batch()).loss > 0


def test_wrap_trainer_with_a_memory_limit_takes_the_optimizer_of_the_arguments(
    tmp_path: Path,
) -> None:
    worker, _ = trainer(llama(), tmp_path, optim="adafactor")
    module = wrap_trainer(worker, memory_limit="64GiB")
    assert module._plans.request.memory_limit.optimizer == "adafactor"
    worker.train()
    assert module.plan.budget_bytes < 64 * 1024**3


def test_a_smaller_last_batch_trains_as_with_the_plain_model(tmp_path: Path) -> None:
    records = []
    for place, wrap in enumerate((plain, planned)):
        worker, record = trainer(
            wrap(llama()), tmp_path / str(place), train_dataset=Sentences(BATCH + 2)
        )
        worker.train()
        records.append(record.logs)
    assert records[0] == records[1]


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_the_loop_of_accelerate(mixed_precision: str) -> None:
    found = []
    for wrap in (plain, planned):
        # it keeps the first precision of a process
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision
        )
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(
            [{k: v[0] for k, v in batch(seed).items()} for seed in range(16)], batch_size=BATCH
        )
        prepared, optimizer, loader = accelerator.prepare(wrap(model), optimizer, loader)
        losses = []
        torch.manual_seed(5)
        for rows in loader:
            with accelerator.accumulate(prepared):
                loss = prepared(**rows).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        found.append(
            (losses, {name: value.clone() for name, value in unwrapped.state_dict().items()})
        )
        with torch.no_grad():
            assert unwrapped(**batch()).loss.dtype is torch.float32
    assert found[0][0] == found[1][0]
    assert not differing(found[1][1], found[0][1])


@pytest.mark.parametrize("how", ["torch.compile", "compile", "called"])
def test_compiling_the_planned_module_leaves_the_plan_as_it_is(how: str) -> None:
    model = llama()
    reference = copy.deepcopy(model)
    module: Any = planned(model)
    run = module
    if how == "torch.compile":
        run = torch.compile(module, backend="eager")
    elif how == "compile":
        module.compile(backend="eager")
    else:
        run = torch.compile(lambda **inputs: module(**inputs), backend="eager")
    for seed in (1, 2):
        for each in (run, reference):
            torch.manual_seed(seed)
            each(**batch(seed)).loss.backward()
    assert module.is_planned
    assert not differing(gradients_of(model), gradients_of(reference))
