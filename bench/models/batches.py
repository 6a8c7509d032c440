"""Batches of random tokens, images and vectors, drawn from a generator on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from bench.models.workload import TARGET

MakeBatch = Callable[[Generator], dict[str, Tensor]]
Shape = tuple[int, ...]
_FIRST_WORD = 3  # smaller ones are special


def seeded_generator(seed: int) -> Generator:
    """A generator for batches; its offset keeps it apart from the draws of the weights."""
    return torch.Generator().manual_seed(1_000_003 + seed)


def words(shape: Shape, vocabulary: int) -> Callable[[Generator], Tensor]:
    """Random tokens."""
    return lambda draw: torch.randint(_FIRST_WORD, vocabulary, shape, generator=draw)


def classes(count: int, *shape: int) -> Callable[[Generator], Tensor]:
    """Random labels."""
    return lambda draw: torch.randint(0, count, shape, generator=draw)


def normal(*shape: int) -> Callable[[Generator], Tensor]:
    """Random values."""
    return lambda draw: torch.randn(*shape, generator=draw)


def drawn(**values: Callable[[Generator], Tensor]) -> MakeBatch:
    """A batch of values that are drawn in this order."""
    return lambda draw: {name: make(draw) for name, make in values.items()}


def causal(shape: Shape, vocabulary: int) -> MakeBatch:
    """Tokens that are their own labels, as causal language models take them."""

    def make(draw: Generator) -> dict[str, Tensor]:
        tokens = words(shape, vocabulary)(draw)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return make


def masked(shape: Shape, vocabulary: int) -> MakeBatch:
    """Tokens of which 15 % are hidden, and the hidden ones as labels."""

    def make(draw: Generator) -> dict[str, Tensor]:
        tokens = words(shape, vocabulary)(draw)
        hidden = torch.rand(shape, generator=draw) < 0.15
        labels = tokens.masked_fill(~hidden, -100)
        return {"input_ids": tokens.masked_fill(hidden, 2), "labels": labels}

    return make


def translated(source: Shape, target: Shape, vocabulary: int) -> MakeBatch:
    """Source and target tokens of an encoder-decoder."""
    return drawn(input_ids=words(source, vocabulary), labels=words(target, vocabulary))


def images(
    batch: int, pixels: int, count: int, names: tuple[str, str] = ("pixel_values", "labels")
) -> MakeBatch:
    """Images with one class each; `names` are the keys of images and classes."""
    values = (normal(batch, 3, pixels, pixels), classes(count, batch))
    return drawn(**dict(zip(names, values, strict=True)))


def vectors(name: str, shape: Shape) -> MakeBatch:
    """Vectors and a target of their shape for the squared error."""
    return drawn(**{name: normal(*shape), TARGET: normal(*shape)})
