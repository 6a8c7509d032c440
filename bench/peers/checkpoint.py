"""Checkpoints around single modules: every k-th layer, or every stage; and eager."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

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
    with checkpointed(workload.layers(model)[::every], **options):
        yield model


@contextmanager
def checkpoint_stages(workload: Workload) -> Iterator[nn.Module]:
    """One non-reentrant checkpoint around every stage.

    Raises:
        ValueError: The model has no stages.
    """
    if workload.stages is None:
        raise ValueError(f"{workload.name} has no stages")
    with checkpointed(workload.stages(workload.model)):
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


def checkpointed(modules: Iterable[nn.Module], **options: Any) -> AbstractContextManager[None]:
    """One non-reentrant checkpoint around each call of a module inside the context."""
    around = partial(checkpoint, use_reentrant=False, preserve_rng_state=True, **options)
    return replaced_forwards({each: partial(around, each.forward) for each in modules})
