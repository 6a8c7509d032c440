"""`wrap_trainer(..., fit="batch")`: another micro-batch, the same effective batch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from fine_tuning import Sentences, gpt2, llama, trainer
from helpers import relative_error
from torch import Tensor, nn

from rockmate import FitError, NothingFitsError, Planner, PlanOptions, wrap_trainer
from rockmate.hf import micro_batch
from rockmate.hf.micro_batch import MicroBatch, _sizes

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainer and of accelerate

LIMIT = "64GiB"


def without_dropout() -> nn.Module:
    return llama(attention_dropout=0.0)


def forced(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Has the search choose `size`, as if nothing larger were as fast."""
    monkeypatch.setattr(
        micro_batch,
        "_planned",
        lambda *given: MicroBatch(
            size=given[3], predicted_ms=1.0 if given[3] == size else 1e3, peak_bytes=1
        ),
    )
    sizes = micro_batch._sizes
    monkeypatch.setattr(
        micro_batch,
        "_sizes",
        lambda *given, **named: [each for each in sizes(*given, **named) if each == size],
    )


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("max_steps", [-1, 5])
def test_trains_as_with_the_given_micro_batch(
    size: int, max_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses, gradient norms and weights of the plain run, and its rows in its order."""
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": max_steps,
        "train_dataset": Sentences(22),  # the last effective batch has 6 rows
        "optim": "sgd",
    }
    seen: dict[str, list[Tensor]] = {"plain": [], "fitted": []}
    found = {}
    for name, rows in seen.items():
        model = without_dropout()
        made, record = trainer(model, tmp_path, **dict(arguments))
        if name == "fitted":
            forced(monkeypatch, size)
            wrap_trainer(made, memory_limit=LIMIT, fit="batch")
            assert made.args.per_device_train_batch_size == size
            assert made.args.gradient_accumulation_steps == 8 // size

        fetch = made.get_batch_samples

        def fetched(*given: Any, rows: list[Tensor] = rows, fetch: Any = fetch) -> Any:
            batches, num_items = fetch(*given)
            rows.extend(row for batch in batches for row in batch["input_ids"])
            return batches, num_items

        made.get_batch_samples = fetched
        made.train()
        found[name] = (record.logs, model.state_dict())
    plain_rows, our_rows = (torch.stack(rows) for rows in seen.values())
    assert torch.equal(our_rows, plain_rows)
    (logs, weights), (our_logs, our_weights) = found["plain"], found["fitted"]
    assert len(our_logs) == len(logs) >= 3
    for ours, theirs in zip(our_logs, logs, strict=True):
        # An epoch's share counts micro-batches, of which the last has fewer rows.
        ours["epoch"] = theirs["epoch"]
        assert ours == pytest.approx(theirs, rel=1e-5)
    for key, weight in our_weights.items():
        assert relative_error(weight, weights[key]) <= 1e-5


def test_the_search_measures_and_says_what_it_chose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = trainer(without_dropout(), tmp_path, gradient_accumulation_steps=2, max_steps=1)
    state = torch.random.get_rng_state()
    with caplog.at_level(logging.INFO, logger="rockmate.hf.micro_batch"):
        wrap_trainer(made, memory_limit=LIMIT, fit="batch")
    assert torch.equal(torch.random.get_rng_state(), state)
    args = made.args
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 8
    assert made._train_batch_size == args.per_device_train_batch_size
    (line,) = [each.message for each in caplog.records if "micro-batch is" in each.message]
    assert f"the micro-batch is {args.per_device_train_batch_size} in" in line
    assert "(asked for: 4 in 2), the same effective batch of 8" in line


def test_the_search_plans_with_the_options_of_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorded(Planner):
        given: ClassVar[list[PlanOptions]] = []

        def __init__(self, model: Any, sample_input: Any, options: PlanOptions) -> None:
            Recorded.given.append(options)
            super().__init__(model, sample_input, options)

    monkeypatch.setattr(micro_batch, "Planner", Recorded)
    made, _ = trainer(without_dropout(), tmp_path, max_steps=1)
    options = {
        "marks": {"model.layers.*.mlp": "recompute"},
        "in_flight": 2,
        "time_limit_s": 9.0,
        "offload": f"disk:{tmp_path}",
        "host_budget": "1GiB",
    }
    module = wrap_trainer(made, memory_limit=LIMIT, fit="batch", **options)
    assert Recorded.given
    for given in Recorded.given:
        assert given.changed.items() >= options.items()
    made.train()
    assert module.plan.options.in_flight == 2


def test_options_are_read_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch, "_planned", lambda *_: pytest.fail("a size was planned"))
    made, _ = trainer(without_dropout(), tmp_path)
    with pytest.raises(TypeError, match="outputz"):
        wrap_trainer(made, memory_limit=LIMIT, fit="batch", outputz="all")


def test_sizes_keep_rows_and_weights_of_an_effective_batch() -> None:
    """Against the rows of each effective batch, cut as a loader cuts them."""

    def batches(size: int, total: int, num_rows: int, drops: bool) -> list[list[int]]:
        cuts = [min(size, num_rows - at) for at in range(0, num_rows, size)]
        cuts = [cut for cut in cuts if cut == size or not drops]
        steps = total // size
        return [cuts[at : at + steps] for at in range(0, len(cuts), steps)]

    for size, steps, num_rows in [(4, 2, 22), (4, 2, 16), (2, 6, 31), (1, 12, 5), (6, 2, 100)]:
        total = size * steps
        for drops in (False, True):
            for scale in ("items", "mean"):
                allowed = _sizes(size, steps, num_rows, drops_last=drops, scale=scale)
                asked = batches(size, total, num_rows, drops)
                for other in (each for each in range(1, total + 1) if total % each == 0):
                    cut = batches(other, total, num_rows, drops)
                    same = [sum(each) for each in cut] == [sum(each) for each in asked]
                    even = all(len(set(each)) <= 1 for each in cut)
                    keeps = same and (scale == "items" or even or other == size)
                    if other <= num_rows:
                        assert (other in allowed) == keeps, (size, steps, num_rows, drops, other)


def test_a_memory_that_no_micro_batch_fits(tmp_path: Path) -> None:
    made, _ = trainer(without_dropout(), tmp_path)
    with pytest.raises(NothingFitsError, match=r"no micro-batch .* fits 1.0 MiB"):
        wrap_trainer(made, memory_limit="1MiB", fit="batch")
    assert made.args.per_device_train_batch_size == 4


class PairLoss(transformers.Trainer):
    """A loss over pairs of rows, as contrastive ones are."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **others: Any
    ) -> Any:
        logits = model(**inputs).logits.mean((1, 2))
        return (logits[:, None] - logits).square().mean()


def test_refusals(tmp_path: Path) -> None:
    def refused(text: str, build: Any = without_dropout, **arguments: Any) -> None:
        kind = arguments.pop("kind", None)
        made, _ = trainer(build(), tmp_path, **arguments)
        if kind is not None:
            made = kind(model=build(), args=made.args, train_dataset=Sentences())
        before = made.args.per_device_train_batch_size, made.args.gradient_accumulation_steps
        with pytest.raises(FitError, match=text):
            wrap_trainer(made, memory_limit=LIMIT, fit="batch")
        after = made.args.per_device_train_batch_size, made.args.gradient_accumulation_steps
        assert after == before

    refused("auto_find_batch_size", auto_find_batch_size=True)
    refused("the loss of two rows is", kind=PairLoss)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            yield from Sentences()

    refused("has no length", train_dataset=Stream(), max_steps=1)

    class OwnLoader(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return super().get_train_dataloader()

    refused("OwnLoader has a get_train_dataloader of its own", kind=OwnLoader)

    def with_batch_norm() -> nn.Module:
        model = gpt2()
        model.transformer.normed = nn.BatchNorm1d(4)
        return model

    refused("transformer.normed takes its statistics", with_batch_norm)
    made, _ = trainer(llama(), tmp_path)
    with pytest.raises(ValueError, match="none is given"):
        wrap_trainer(made, 0.5, fit="batch")
    with pytest.raises(ValueError, match="fit is 'rows'"):
        wrap_trainer(made, memory_limit=LIMIT, fit="rows")  # type: ignore[arg-type]
