"""Batches of random tokens, images and vectors, drawn from a generator on the CPU.

Each function gives the maker of one value, or of a whole batch, for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

TARGET = "target"
"""Name of the batch entry that the loss outside the model reads and the model itself never sees."""

MakeValue = Callable[[Generator, int], Tensor]
MakeBatch = Callable[[Generator, int], dict[str, Tensor]]
_FIRST_WORD = 3  # smaller ones are special


def seeded_generator(seed: int) -> Generator:
    """A generator for batches; its offset keeps it apart from the draws of the weights."""
    return torch.Generator().manual_seed(1_000_003 + seed)


def words(length: int, vocabulary: int) -> MakeValue:
    """Random tokens."""
    return lambda draw, rows: torch.randint(_FIRST_WORD, vocabulary, (rows, length), generator=draw)


def classes(count: int, *shape: int) -> MakeValue:
    """Random labels, of this shape for each row."""
    return lambda draw, rows: torch.randint(0, count, (rows, *shape), generator=draw)


def normal(*shape: int) -> MakeValue:
    """Random values, of this shape for each row."""
    return lambda draw, rows: torch.randn(rows, *shape, generator=draw)


def leading(count: int, *shape: int) -> MakeValue:
    """Random values, so many of this shape before the rows."""
    return lambda draw, rows: torch.randn(count, rows, *shape, generator=draw)


def uniform(most: float) -> MakeValue:
    """A random number below `most`."""
    return lambda draw, rows: most * torch.rand(rows, generator=draw)


def ones(count: int) -> MakeValue:
    """As many ones."""
    return lambda _, rows: torch.ones(rows, count)


def drawn(**values: MakeValue) -> MakeBatch:
    """A batch of values that are drawn in this order."""
    return lambda draw, rows: {name: make(draw, rows) for name, make in values.items()}


def causal(length: int, vocabulary: int) -> MakeBatch:
    """Tokens that are their own labels, as causal language models take them."""

    def make(draw: Generator, rows: int) -> dict[str, Tensor]:
        tokens = words(length, vocabulary)(draw, rows)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return make


def masked(length: int, vocabulary: int) -> MakeBatch:
    """Tokens of which 15 % are hidden, and the hidden ones as labels."""

    def make(draw: Generator, rows: int) -> dict[str, Tensor]:
        tokens = words(length, vocabulary)(draw, rows)
        hidden = torch.rand((rows, length), generator=draw) < 0.15
        labels = tokens.masked_fill(~hidden, -100)
        return {"input_ids": tokens.masked_fill(hidden, 2), "labels": labels}

    return make


def classified(length: int, vocabulary: int, count: int) -> MakeBatch:
    """Sequences of tokens with one class each."""
    return drawn(input_ids=words(length, vocabulary), labels=classes(count))


def translated(source: int, target: int, vocabulary: int) -> MakeBatch:
    """Source and target tokens of an encoder-decoder."""
    return drawn(input_ids=words(source, vocabulary), labels=words(target, vocabulary))


def images(
    pixels: int, count: int, names: tuple[str, str] = ("pixel_values", "labels")
) -> MakeBatch:
    """Images with one class each; `names` are the keys of images and classes."""
    return drawn(**{names[0]: normal(3, pixels, pixels), names[1]: classes(count)})


def vectors(name: str, *shape: int) -> MakeBatch:
    """Vectors and a target of their shape for the squared error."""
    return drawn(**{name: normal(*shape), TARGET: normal(*shape)})
