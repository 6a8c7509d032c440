"""The cost of batches of other lengths after the first, without a further capture for each.

    taskset -c 1 python -m bench.lengths > bench/results/lengths_cpu_<yyyymm>.md
    taskset -c 1 python -m bench.lengths --model gpt2 --lengths 5

Each model is planned for a batch of 4 x 96 tokens at half of its activation peak. Then come batches
of other lengths, all different; every third batch has 3 sequences. Each is trained on planned and
in eager, from the same weights and random state, and once more under the allocator's meter. The
cost of a length is the processor time between its call and its program. The first other length pays
for the symbolic capture.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

from bench import measure
from bench.machine import machine_record
from bench.pages import machine_section, table
from rockmate import RockmateModule
from rockmate.plan_cache import PlanCache

BATCH, LENGTH, VOCABULARY = 4, 96, 8192
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCost:
    """One batch of another shape.

    Attributes:
        shape: Sequences and tokens.
        cost_ms: Processor time until it had a program.
        step_ms: Processor time of the planned step after that.
        peak_share: The allocator's peak over the budget.
        is_equal: Whether loss and gradients are bitwise eager's.
    """

    shape: tuple[int, int]
    cost_ms: float
    step_ms: float
    peak_share: float
    is_equal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLengths:
    """One model over all lengths.

    Attributes:
        name: Of the model.
        plan_s: Processor time of capture, measurement, plan and first step of the sample.
        num_captures: Captures in the log after the sample's.
        lengths: In the order of training.
    """

    name: str
    plan_s: float
    num_captures: int
    lengths: tuple[LengthCost, ...]


def gpt2() -> nn.Module:
    """GPT-2, 12 layers of width 128."""
    config = transformers.GPT2Config(
        n_layer=12, n_embd=128, n_head=4, n_positions=128, use_cache=False, **_SMALL
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """A Llama type, 8 layers of width 128."""
    config = transformers.LlamaConfig(
        num_hidden_layers=8,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=344,
        use_cache=False,
        **_SMALL,
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    """BERT, 12 layers of width 128, whose batches have a padding mask."""
    config = transformers.BertConfig(
        num_hidden_layers=12,
        hidden_size=128,
        num_attention_heads=4,
        intermediate_size=512,
        **_SMALL,
    )
    return transformers.BertForMaskedLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "bert": bert}


def batch_of(name: str, shape: tuple[int, int], seed: int) -> dict[str, Tensor]:
    """Random tokens and labels.

    BERT also gets a mask that pads each sequence by another number of tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(3, VOCABULARY, shape, generator=draw) for _ in range(2))
    if name != "bert":
        return {"input_ids": tokens, "labels": labels}
    padded = torch.arange(shape[0])[:, None] * 5
    return {
        "input_ids": tokens,
        "attention_mask": (torch.arange(shape[1]) >= padded).long(),
        "labels": labels,
    }


def shapes_of(num_lengths: int) -> list[tuple[int, int]]:
    """So many different lengths below the sample's, in no order of size.

    Every third batch has one sequence less.
    """
    lengths = [LENGTH - 1 - 37 * index % 89 for index in range(num_lengths)]
    return [
        (BATCH if index % 3 != 2 else BATCH - 1, length) for index, length in enumerate(lengths)
    ]


def measure_model(name: str, num_lengths: int) -> ModelLengths:
    """Trains one model on the sample and on `num_lengths` other lengths."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    eager = copy.deepcopy(model)
    captures = _CaptureLog()
    begin = time.process_time()
    module = RockmateModule(model, batch_of(name, (BATCH, LENGTH), 0), 0.5, trial="never")
    _gradients_after(module, model, batch_of(name, (BATCH, LENGTH), 0))
    plan_s = time.process_time() - begin
    lengths = []
    with captures:
        for seed, shape in enumerate(shapes_of(num_lengths), start=1):
            lengths.append(_measure_length(module, model, eager, batch_of(name, shape, seed)))
    return ModelLengths(
        name=name, plan_s=plan_s, num_captures=captures.num_captures, lengths=tuple(lengths)
    )


def _measure_length(
    module: RockmateModule, model: nn.Module, eager: nn.Module, batch: dict[str, Tensor]
) -> LengthCost:
    begin = time.process_time()
    with _timed_preparation() as spent_ms:
        ours = _gradients_after(module, model, batch)
    total_ms = (time.process_time() - begin) * 1e3
    theirs = _gradients_after(eager, eager, batch)
    peak_bytes = measure.allocator_peak(lambda: module(**batch).loss.backward())
    rows, columns = batch["input_ids"].shape
    return LengthCost(
        shape=(rows, columns),
        cost_ms=sum(spent_ms),
        step_ms=total_ms - sum(spent_ms),
        peak_share=peak_bytes / module.plan.budget_bytes,
        is_equal=ours.keys() == theirs.keys()
        and all(torch.equal(ours[key], theirs[key]) for key in ours),
    )


@contextmanager
def _timed_preparation() -> Iterator[list[float]]:
    """Collects the processor time in ms that the module takes to prepare a call of other sizes."""
    prepare, spent_ms = PlanCache._plan_for_shapes, []

    def timed(*args: Any) -> Any:
        begin = time.process_time()
        runnable = prepare(*args)
        spent_ms.append((time.process_time() - begin) * 1e3)
        return runnable

    with mock.patch.object(PlanCache, "_plan_for_shapes", timed):
        yield spent_ms


def _gradients_after(
    callee: nn.Module, owner: nn.Module, batch: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The loss and all gradients of one step from a fixed random state."""
    owner.zero_grad(set_to_none=False)
    torch.manual_seed(1)
    loss = callee(**batch).loss
    loss.backward()
    return {"": loss.detach(), **measure.gradients_of(owner)}


class _CaptureLog(logging.Handler):
    """Counts the captures in the log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.num_captures = 0
        self._logger = logging.getLogger("rockmate")
        self._level = self._logger.level

    def emit(self, record: logging.LogRecord) -> None:
        self.num_captures += record.getMessage().startswith(("captured", "planned for this call"))

    def __enter__(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)
        self._logger.removeHandler(self)


COLUMNS = (
    *("model", "plan, s", "first other length, s", "each later, median ms", "largest, ms"),
    *("step, ms", "captures", "peak / budget", "equal to eager"),
)


def as_row(result: ModelLengths) -> list[str]:
    """One row of the table."""
    first, *later = result.lengths
    costs = [length.cost_ms for length in later] or [0.0]
    return [
        *(result.name, f"{result.plan_s:.1f}", f"{first.cost_ms / 1e3:.1f}"),
        *(f"{statistics.median(costs):.1f}", f"{max(costs):.1f}"),
        f"{statistics.median(length.step_ms for length in result.lengths):.0f}",
        str(result.num_captures),
        f"{max(length.peak_share for length in result.lengths):.3f}",
        f"{sum(length.is_equal for length in result.lengths)} of {len(result.lengths)}",
    ]


def page(rows: Sequence[Sequence[str]], record: Mapping[str, Any]) -> str:
    """The page, with the slowest later length as its headline."""
    slowest = max(rows, key=lambda row: float(row[3]))
    lines = [
        "# Batches of other lengths",
        "",
        f"**After the first other length, each further one costs at most {slowest[3]} ms of "
        f"processor time as a median ({slowest[0]}), with steps of {slowest[5]} ms.**",
        "",
        *table(COLUMNS, rows),
        "",
        *machine_section(record),
        "",
        "## How it was measured",
        "",
        " ".join((__doc__ or "").split("\n\n")[2].split())
        + " Captures counts the captures after the sample's.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.lengths", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="default: all")
    number = "number of different lengths after the first, at most 89"
    parser.add_argument("--lengths", type=int, default=20, help=number)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record = machine_record("bench.lengths")
    rows = [as_row(measure_model(name, chosen.lengths)) for name in chosen.model or MODELS]
    sys.stdout.write(page(rows, record))


if __name__ == "__main__":
    main()
