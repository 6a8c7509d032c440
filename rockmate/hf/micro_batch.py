"""The micro-batch of a trainer: the fastest that fits a memory, at the same effective batch.

Rows are the same in the same order, since samplers draw rows and batches are cut from them. The
gradient is that of the effective batch if the loss of a micro-batch is its share of that batch's:

* where the trainer counts the items to predict in the effective batch, and divides by them;
* where it takes the mean over micro-batches, each row counts alike, and no effective batch has
  micro-batches of different sizes.

That the loss adds up so is tried on two rows of the training set.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rockmate.budget import size_text
from rockmate.capture.signature import SampleCall
from rockmate.curves.errors import FitError, NothingFitsError
from rockmate.errors import InfeasibleBudgetError, InfeasibleMemoryLimitError
from rockmate.hf.longest_batch import longest_rows
from rockmate.memory_limit import MemoryLimit
from rockmate.module import RockmateModule
from rockmate.planner import Planner
from rockmate.planning.options import PlanOptions
from rockmate.state.random_state import all_gpus, random_state_kept

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)

_OWN_BATCHES = ("get_train_dataloader", "get_batch_samples", "_inner_training_loop")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Relative, of a loss that is summed in another order: some units in the last place.
_ULPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A micro-batch that fits.

    Attributes:
        size: rows.
        predicted_ms: forward and backward of one.
        peak_bytes: its activation peak.
    """

    size: int
    predicted_ms: float
    peak_bytes: int

    @property
    def samples_per_s(self) -> float:
        """Rows a second."""
        return 1e3 * self.size / self.predicted_ms


def fit_micro_batch(trainer: Trainer, limit: MemoryLimit, options: Mapping[str, Any]) -> MicroBatch:
    """Gives a trainer the micro-batch that trains the most rows a second within a memory.

    `per_device_train_batch_size` and `gradient_accumulation_steps` of its arguments are set; their
    product stays. One line of the logger says so. Op times are measured, at the largest micro-batch
    that fits and at smaller ones until those are slower.

    Args:
        trainer: that has not started.
        limit: the memory and the optimizer.
        options: of `RockmateModule`; those of `Planner` among them count.

    Raises:
        NothingFitsError: the smallest micro-batch that keeps the effective batch does not fit.
        FitError: the effective batch cannot be kept, or the trainer makes its own batches.
        UnknownOptionError: an option is not known.
    """
    own = inspect.signature(RockmateModule).parameters
    keywords = {name: value for name, value in options.items() if name not in own}
    planned = PlanOptions.of(options.get("options"), keywords, known=own)
    for why in _obstacles(trainer):
        raise _refusal(why)
    args = trainer.args
    before = args.per_device_train_batch_size, args.gradient_accumulation_steps
    with random_state_kept(all_gpus()):
        rows = _Rows(trainer)
        scale = _loss_scale(trainer, rows)
        sizes = _sizes(*before, rows.number, drops_last=args.dataloader_drop_last, scale=scale)
        found = _fastest(trainer, limit, rows, sizes, planned)
    args.per_device_train_batch_size = found.size
    args.gradient_accumulation_steps = before[0] * before[1] // found.size
    trainer._train_batch_size = args.train_batch_size
    _say(before, found, args.gradient_accumulation_steps)
    return found


def _say(before: tuple[int, int], found: MicroBatch, num_steps: int) -> None:
    level = logging.INFO if found.size == before[0] else logging.WARNING
    logger.log(
        level,
        "the micro-batch is %d in %d accumulation steps (asked for: %d in %d), the same effective "
        "batch of %d: the fastest that fits, at %.4g samples/s and an activation peak of %s",
        found.size, num_steps, *before, before[0] * before[1], found.samples_per_s,
        size_text(found.peak_bytes),
    )  # fmt: skip


# --- what is refused ------------------------------------------------------------------------------


def _refusal(why: str) -> FitError:
    return FitError(
        f'fit="batch" cannot keep the effective batch: {why}. Set per_device_train_batch_size, and '
        "leave fit out."
    )


def _obstacles(trainer: Trainer) -> Iterator[str]:
    """Why the effective batch of a trainer cannot be kept."""
    from transformers import Trainer
    from transformers.trainer_utils import has_length

    args, model, kind = trainer.args, trainer.model, type(trainer).__name__
    assert model is not None
    if args.world_size > 1:
        yield (
            f"this run has {args.world_size} processes, whose micro-batches have to agree; "
            "`rockmate fit` tells one that fits"
        )
    if args.auto_find_batch_size:
        yield "auto_find_batch_size changes the batch as well"
    for name in _OWN_BATCHES:
        if getattr(getattr(trainer, name), "__func__", None) is not getattr(Trainer, name):
            yield f"{kind} has a {name} of its own, so its batches may not follow its arguments"
    if trainer.train_dataset is None or not has_length(trainer.train_dataset):
        yield "the training set has no length, so it cannot be told which rows share a batch"
    for path, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS) and module.training:
            yield (
                f"{path or type(module).__name__} takes its statistics from the micro-batch, so "
                "another one trains another model"
            )


# --- the rows -------------------------------------------------------------------------------------


class _Rows:
    """The longest rows of a training set, as batches of any size.

    Attributes:
        number: of rows in the training set.
    """

    def __init__(self, trainer: Trainer) -> None:
        loader: Any = trainer.get_train_dataloader()
        self._collate = loader.collate_fn
        self._trainer = trainer
        self.number = len(loader.dataset)
        self._rows = longest_rows(loader.dataset)
        if not self._rows:
            raise _refusal("the longest rows are looked for, and its rows are no mappings")

    def batch(self, size: int) -> dict[str, Any]:
        """A batch of the longest rows, those over and over if there are fewer."""
        rows = [self._rows[index % len(self._rows)] for index in range(size)]
        return dict(self._trainer._prepare_inputs(self._collate(rows)))

    def num_items(self, batch: Mapping[str, Any]) -> Any:
        """What the trainer divides the loss of an effective batch by; None if by nothing."""
        trainer = self._trainer
        return trainer._get_num_items_in_batch([batch], trainer.args.device)


def _sizes(size: int, num_steps: int, num_rows: int, *, drops_last: bool, scale: str) -> list[int]:
    """Micro-batches that keep rows and loss of the effective batch, largest first.

    Args:
        size: the micro-batch that was asked for.
        num_steps: its accumulation steps.
        num_rows: of the training set.
        drops_last: whether an incomplete micro-batch at the end of an epoch is dropped.
        scale: "items" or "mean"; see `_loss_scale`.
    """
    total = size * num_steps
    used = num_rows - num_rows % size if drops_last else num_rows
    rest = used % total
    return [
        other
        for other in range(min(total, num_rows), 0, -1)
        if total % other == 0
        and (not drops_last or num_rows - num_rows % other == used)
        and (other == size or scale == "items" or rest < other or rest % other == 0)
    ]


# --- the loss -------------------------------------------------------------------------------------


def _loss_scale(trainer: Trainer, rows: _Rows) -> str:
    """Whether the loss is divided by the "items" of the effective batch, or is a "mean".

    Raises:
        FitError: the loss of two rows is not what the losses of the two come to.
    """
    batch = rows.batch(2)
    parts = [_row_of(batch, index) for index in range(2)]
    num_items = rows.num_items(batch)
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # transformers 5.17 has no such
    if is_scaled is None:
        is_scaled = trainer.compute_loss_func is not None or (
            trainer.model_accepts_loss_kwargs and num_items is not None
        )
    model: Any = trainer.model

    def loss(part: dict[str, Any]) -> float:
        found: Any = trainer.compute_loss(model, dict(part), num_items_in_batch=num_items)
        return float(found)

    own = trainer.compute_loss_context_manager(), trainer.accelerator.autocast()
    with _evaluated(model), torch.no_grad(), own[0], own[1]:
        whole, *each = map(loss, (batch, *parts))
    total = sum(each) if is_scaled else sum(each) / len(each)
    tolerance = _ULPS * _epsilon(trainer) * max(abs(whole), *map(abs, each))
    if abs(whole - total) > tolerance:
        how = "sum" if is_scaled else "mean"
        raise _refusal(
            f"the loss of two rows is {whole:.6g}, and the {how} of their losses, which Trainer "
            f"takes when it accumulates, is {total:.6g}"
        )
    return "items" if is_scaled else "mean"


def _epsilon(trainer: Trainer) -> float:
    args = trainer.args
    if args.bf16 or args.fp16:
        return torch.finfo(torch.bfloat16 if args.bf16 else torch.float16).eps
    assert trainer.model is not None
    return max(
        torch.finfo(each.dtype).eps
        for each in trainer.model.parameters()
        if each.is_floating_point()
    )


def _row_of(batch: Mapping[str, Any], index: int) -> dict[str, Any]:
    """One row of a batch of two.

    Raises:
        FitError: something in it has no rows.
    """
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[0] != 2:
            raise _refusal(f"{name!r} of a batch of two rows is no tensor of two rows")
    return {name: value[index : index + 1] for name, value in batch.items()}


@contextmanager
def _evaluated(model: Any) -> Iterator[None]:
    """Without dropout, whatever the mode of each submodule."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# --- the search -----------------------------------------------------------------------------------


def _fastest(
    trainer: Trainer,
    limit: MemoryLimit,
    rows: _Rows,
    sizes: Sequence[int],
    options: PlanOptions,
) -> MicroBatch:
    """Of the micro-batches that fit the one of the most rows a second."""
    best: MicroBatch | None = None
    refusal = ""
    for size in sizes:
        try:
            found = _planned(trainer, limit, rows, size, options)
        except (
            InfeasibleBudgetError, InfeasibleMemoryLimitError, torch.OutOfMemoryError
        ) as error:  # fmt: skip
            refusal = f"{size}: {str(error).partition(' Ask for ')[0]}"
            continue
        if best is not None and found.samples_per_s <= best.samples_per_s:
            break
        best = found
    if best is not None:
        return best
    raise NothingFitsError(
        f"no micro-batch that keeps the effective batch fits {size_text(limit.limit_bytes)}. The "
        f"smallest is {refusal} Shorten the rows, train fewer parameters (LoRA), or take an "
        "optimizer with less state.",
        memory_bytes=limit.limit_bytes,
        least_bytes=limit.limit_bytes + 1,
    )


def _planned(
    trainer: Trainer,
    limit: MemoryLimit,
    rows: _Rows,
    size: int,
    options: PlanOptions,
) -> MicroBatch:
    """A micro-batch with measured costs; `InfeasibleBudgetError` if it does not fit."""
    model = trainer.model
    assert model is not None
    call = _model_call(trainer, rows, size)
    args = trainer.args
    num_steps = args.per_device_train_batch_size * args.gradient_accumulation_steps // size
    # A trainer fetches all micro-batches of a step before the first.
    batch_bytes = num_steps * sum(
        each.nbytes for each in call.kwargs.values() if isinstance(each, torch.Tensor)
    )
    with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
        planner = Planner(model, call, options)
    budget_bytes = limit.activation_budget_bytes(model) - batch_bytes
    plan = planner.plan(max(1, budget_bytes))
    return MicroBatch(
        size=size, predicted_ms=plan.predicted_ms, peak_bytes=plan.predicted_peak_bytes
    )


class _Recorded(Exception):
    """Ends a loss computation once the call of the model is known."""


def _model_call(trainer: Trainer, rows: _Rows, size: int) -> SampleCall:
    """The call that the trainer makes of its model for a batch."""
    batch = rows.batch(size)
    made: list[SampleCall] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        made.append(SampleCall(args, kwargs))
        raise _Recorded

    try:
        trainer.compute_loss(record, dict(batch), num_items_in_batch=rows.num_items(batch))  # pyright: ignore
    except _Recorded:
        return made[0]
    raise _refusal(
        f"{type(trainer).__name__}.compute_loss does not call the model that it is given"
    )
