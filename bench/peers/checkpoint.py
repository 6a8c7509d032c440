"""Checkpoints around single modules: every k-th layer, or every stage; eager and offloading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.models import Workload


@contextmanager
def eager(workload: Workload) -> Iterator[nn.Module]:
    """The model as it is, without recomputation."""
    yield workload.model


@contextmanager
def checkpoint_layers(workload: Workload, *, every: int = 1, **options: Any) -> Iterator[nn.Module]:
    """One non-reentrant checkpoint around every layer, or around the first of each `every`.

    Gradients equal eager's, since the random state is restored for the recomputation. Buffers do
    not: a BatchNorm inside a layer updates its running statistics twice a step.

    Args:
        workload: The model.
        every: As `every_n_layers` of Hugging Face models: layers 0, `every`, 2 * `every` and so on
            are checkpointed.
        **options: Further ones of `torch.utils.checkpoint.checkpoint`.
    """
    model: Any = workload.model
    # Versions of transformers without `every_n_layers` have another name for it.
    if getattr(model, "supports_gradient_checkpointing", False) and hasattr(
        model, "activation_checkpointing_enable"
    ):
        model.activation_checkpointing_enable(
            {"use_reentrant": False, **options}, every_n_layers=every
        )
        try:
            yield model
        finally:
            model.activation_checkpointing_disable()
            # Enabling left a hook on the embeddings.
            model.disable_input_require_grads()
        return
    layers = workload.layers(model)[::every]
    wrapped = {
        layer: partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=True, **options
        )
        for layer in layers
    }
    with replaced_forwards(wrapped):
        yield model


def checkpoint_per_layer(workload: Workload) -> AbstractContextManager[nn.Module]:
    """One checkpoint per layer, the usual setting."""
    return checkpoint_layers(workload)


@contextmanager
def checkpoint_stages(workload: Workload) -> Iterator[nn.Module]:
    """One non-reentrant checkpoint around every stage.

    Raises:
        ValueError: The model has no stages.
    """
    if workload.stages is None:
        raise ValueError(f"{workload.name} has no stages")
    stages = workload.stages(workload.model)
    with replaced_forwards(
        {
            stage: partial(checkpoint, stage.forward, use_reentrant=False, preserve_rng_state=True)
            for stage in stages
        }
    ):
        yield workload.model


@contextmanager
def offloaded(workload: Workload) -> Iterator[nn.Module]:
    """Eager, with every saved value copied to pinned host memory and back."""
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        yield workload.model


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Each module with another forward inside the context."""
    # Set on the instance, a forward shadows the class's method until `del` removes it.
    for layer, forward in forwards.items():
        layer.forward = forward
    try:
        yield
    finally:
        for layer in forwards:
            del layer.forward
