"""Batches of random tokens, images and vectors: equal seeds give equal values."""

from __future__ import annotations

import torch

from bench.models.workload import TARGET, Batch


def seeded_generator(seed: int) -> torch.Generator:
    """A generator for batches; its offset keeps it apart from the draws of the weights."""
    return torch.Generator().manual_seed(1_000_003 + seed)


def causal_tokens(
    seed: int, *, shape: tuple[int, int], vocabulary: int, device: torch.device
) -> Batch:
    """Tokens that are their own labels, as causal language models take them."""
    tokens = torch.randint(3, vocabulary, shape, generator=seeded_generator(seed)).to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def classified_tokens(
    seed: int, *, shape: tuple[int, int], vocabulary: int, device: torch.device
) -> Batch:
    """Tokens with one of four labels a sequence."""
    tokens = torch.randint(1, vocabulary, shape, generator=seeded_generator(seed))
    labels = torch.randint(0, 4, shape[:1], generator=seeded_generator(seed + 1))
    return {"input_ids": tokens.to(device), "labels": labels.to(device)}


def masked_tokens(
    seed: int, *, shape: tuple[int, int], vocabulary: int, device: torch.device
) -> Batch:
    """Tokens of which 15 % are hidden, and the hidden ones as labels."""
    generator = seeded_generator(seed)
    tokens = torch.randint(3, vocabulary, shape, generator=generator)
    hidden = torch.rand(shape, generator=generator) < 0.15
    labels = tokens.masked_fill(~hidden, -100)
    return {"input_ids": tokens.masked_fill(hidden, 2).to(device), "labels": labels.to(device)}


def translation_tokens(
    seed: int,
    *,
    shape: tuple[int, int],
    labels_shape: tuple[int, int],
    vocabulary: int,
    device: torch.device,
) -> Batch:
    """Source and target tokens of an encoder-decoder."""
    generator = seeded_generator(seed)
    tokens = torch.randint(3, vocabulary, shape, generator=generator)
    labels = torch.randint(3, vocabulary, labels_shape, generator=generator)
    return {"input_ids": tokens.to(device), "labels": labels.to(device)}


def labelled_images(
    seed: int,
    *,
    batch: int,
    pixels: int,
    classes: int,
    names: tuple[str, str],
    device: torch.device,
) -> Batch:
    """Images with one class each; `names` are the keys of images and classes."""
    generator = seeded_generator(seed)
    images = torch.randn(batch, 3, pixels, pixels, generator=generator)
    classes_wanted = torch.randint(0, classes, (batch,), generator=generator)
    return {names[0]: images.to(device), names[1]: classes_wanted.to(device)}


def segmented_images(
    seed: int, *, batch: int, pixels: int, classes: int, device: torch.device
) -> Batch:
    """Images with one class a pixel."""
    generator = seeded_generator(seed)
    images = torch.randn(batch, 3, pixels, pixels, generator=generator)
    classes_wanted = torch.randint(0, classes, (batch, pixels, pixels), generator=generator)
    return {"x": images.to(device), TARGET: classes_wanted.to(device)}


def regression_vectors(
    seed: int,
    *,
    shape: tuple[int, ...],
    name: str,
    target_shape: tuple[int, ...],
    device: torch.device,
) -> Batch:
    """Vectors and a target for the squared error; `name` is the key of the vectors."""
    generator = seeded_generator(seed)
    vectors = torch.randn(shape, generator=generator)
    target = torch.randn(target_shape, generator=generator)
    return {name: vectors.to(device), TARGET: target.to(device)}
