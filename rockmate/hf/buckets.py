"""Batches of few lengths.

A data collator that pads to the next of some lengths, for models that are captured once for each of
them.

Most models need none of this: one capture with symbols serves every length
(`rockmate/symbolic.py`). A model that branches or loops on the length, or that runs a submodule as
it is (recurrent layers do), is captured for each length by itself. Padding changes no loss if the
model passes over it, which a module cannot know of the model that it wraps: hence a collator, which
the user chooses, and not an option of `RockmateModule`. The term *bucket* for one of the lengths is
TensorFlow's (`bucket_by_sequence_length`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rockmate.errors import InvalidArgumentError

_MASK = "attention_mask"
_TOKENS = "input_ids"
_IGNORED = -100  # by losses: PyTorch's `ignore_index`
_ZEROS = (_MASK, "decoder_attention_mask", "token_type_ids", "position_ids")


class PadToBuckets:
    """A data collator whose batches have one of a few lengths.

    Tokens are padded with `pad_token_id`, labels with -100, masks and positions with 0, all at the
    end of dimension 1. A plan for the longest keeps the budget for all of them, so with a list of
    lengths the first batch is padded to the last one: it is the one that a module without a sample
    plans for.
    """

    def __init__(
        self,
        collator: Callable[[Any], Any],
        lengths: int | Sequence[int],
        *,
        pad_token_id: int = 0,
        adds_mask: bool = True,
        padding: Mapping[str, float | None] | None = None,
    ) -> None:
        """Takes the collator that makes the batches.

        Args:
            collator: makes a mapping of names to tensors of a list of rows, as those of Hugging
                Face and `default_collate` do.
            lengths: in tokens, in any order; or one number, whose multiples are the lengths.
            pad_token_id: the model's; some find the end of a text by it.
            adds_mask: a batch without `attention_mask` gets one. False is right for a model in
                which no token sees those after it.
            padding: what other tensors are padded with, by name; None leaves one as it is.

        Raises:
            InvalidArgumentError: a length is not positive, or there is none.
        """
        self._collator = collator
        self._multiple = lengths if isinstance(lengths, int) else 0
        self._lengths = () if isinstance(lengths, int) else tuple(sorted(lengths))
        if min((self._multiple,) if isinstance(lengths, int) else self._lengths, default=0) < 1:
            raise InvalidArgumentError(
                f"lengths is {lengths!r}; give the lengths in tokens ([128, 256, 512]), or one "
                "number whose multiples they are (64)"
            )
        self._adds_mask = adds_mask
        known = {
            _TOKENS: pad_token_id,
            "decoder_input_ids": pad_token_id,
            "labels": _IGNORED,
            **dict.fromkeys(_ZEROS, 0),
        }
        self._padding: Mapping[str, float | None] = {**known, **(padding or {})}
        self._is_first = True

    def __call__(self, rows: Any) -> Any:
        """The collator's batch, padded.

        Raises:
            InvalidArgumentError: the batch is no mapping; it is longer than all lengths, or has a
                tensor as long as its tokens of which is not known how to pad it.
        """
        batch = self._collator(rows)
        if not isinstance(batch, MutableMapping):
            raise InvalidArgumentError(
                f"the data collator made a {type(batch).__name__}, and only tensors that have "
                "names are padded. Let it make a dict."
            )
        if self._adds_mask and _TOKENS in batch and _MASK not in batch:
            batch[_MASK] = torch.ones_like(batch[_TOKENS])
        longest = self._lengths[-1] if self._lengths and self._is_first else 0
        num_tokens = batch[_TOKENS].shape[1] if _TOKENS in batch else None
        for name, value in list(batch.items()):
            if self._is_sequence(name, value, num_tokens):
                length = max(longest, self._bucket(value.shape[1], name))
                missing = [0, 0] * (value.ndim - 2) + [0, length - value.shape[1]]
                batch[name] = functional.pad(value, missing, value=self._padding[name])
        self._is_first = False
        return batch

    def _is_sequence(self, name: str, value: Any, num_tokens: int | None) -> bool:
        """Whether a tensor is to be padded."""
        if not isinstance(value, Tensor) or value.ndim < 2:
            return False
        if name in self._padding:
            is_of_classes = (
                name == "labels" and value.is_floating_point()
            )  # one number for each class, not for each token
            return self._padding[name] is not None and not is_of_classes
        if value.shape[1] == num_tokens:
            raise InvalidArgumentError(
                f"{name} is as long as {_TOKENS} ({num_tokens} tokens), and nothing says what to "
                "pad it with. Pass "
                f"padding={{{name!r}: 0}}, or another value; None if it is not to be padded."
            )
        return False

    def _bucket(self, length: int, name: str) -> int:
        if self._multiple:
            return -(-length // self._multiple) * self._multiple
        place = bisect_left(self._lengths, length)
        if place == len(self._lengths):
            raise InvalidArgumentError(
                f"{name} has {length} tokens, more than the largest of the lengths "
                f"{list(self._lengths)}. Truncate, or add a longer one."
            )
        return self._lengths[place]
