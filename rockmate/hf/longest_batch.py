"""The largest batch that a trainer will make, so that its first plan is made for it."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rockmate.capture.signature import CallSignature, TensorSignature, is_no_larger
from rockmate.state.random_state import all_gpus, random_state_kept

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)

# Rows of the training set whose lengths are looked at.
_MOST_ROWS = 1024


def largest_call(trainer: Trainer, call: CallSignature) -> CallSignature:
    """The first call of a trainer's model at the sizes of the trainer's largest batch.

    That batch has the longest rows among at most 1,024 of the training set, evenly spaced. It is
    the call itself if the rows cannot be told: a stream, or an input that is no column of a batch.
    """
    args, named = call.structure.rebuild(list(call.tensors))
    named = {**named, **next((each for each in args if isinstance(each, Mapping)), {})}
    if not all(any(each is value for value in named.values()) for each in call.tensors):
        return call
    name_of = {id(value): name for name, value in named.items()}
    try:
        batch = _longest_batch(trainer, named)
    except Exception as error:  # noqa: BLE001 (a data set may be readable in its workers only)
        logger.warning(
            "the first batch is planned for, since the longest rows of the training set cannot be "
            "read here: %s: %s",
            type(error).__name__,
            error,
        )
        return call
    tensors: list[TensorSignature] = []
    for signature in call.tensors:
        found = batch.get(name_of[id(signature)])
        if isinstance(found, torch.Tensor) and found.ndim == len(signature.shape):
            tensors.append(replace(signature, shape=tuple(found.shape)))
        elif signature.shape:
            return call
        else:
            tensors.append(signature)
    largest = replace(call, tensors=tuple(tensors))
    return largest if is_no_larger(call, largest) else call


def _longest_batch(trainer: Trainer, named: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch of the longest rows, as the trainer's loader collates it.

    It is empty for a stream, and where rows are no mappings. Columns in `named` alone count.
    """
    loader: Any = trainer.callback_handler.train_dataloader
    dataset = getattr(loader, "dataset", None)
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return {}
    step = -(-len(dataset) // _MOST_ROWS)
    with random_state_kept(all_gpus()):
        rows = [dataset[index] for index in range(0, len(dataset), step)]
        if not all(isinstance(row, Mapping) for row in rows):
            return {}
        rows.sort(key=lambda row: _length(row, named), reverse=True)
        batch_size = loader.batch_size or trainer.args.train_batch_size
        batch = loader.collate_fn(rows[:batch_size])
        return batch if isinstance(batch, Mapping) else {}  # rows as they are, in GRPO's


def _length(row: Mapping[str, Any], named: Container[str]) -> int:
    values = [value for name, value in row.items() if name in named]
    sized = (each for each in values if hasattr(each, "__len__") and getattr(each, "ndim", 1))
    return max(map(len, sized), default=0)
