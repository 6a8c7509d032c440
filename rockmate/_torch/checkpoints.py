"""Calls of `torch.utils.checkpoint` in a model's forward, observed while it is captured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints


@contextlib.contextmanager
def checkpoints_observed(
    region: Callable[[bool], AbstractContextManager[None]],
) -> Iterator[None]:
    """Runs each checkpointed call within a context, and a reentrant one as a plain call.

    Models call `torch.utils.checkpoint.checkpoint`, under any name, so only what that calls can be
    replaced. The reentrant kind runs its function without gradients and differentiates in a
    backward of its own, which a captured joint graph cannot have: its call would be captured
    without a backward.

    Args:
        region: makes the context of a call. It is told whether the call selects what it saves.
    """
    generator, function = (
        checkpoints._checkpoint_without_reentrant_generator,
        checkpoints.CheckpointFunction,
    )
    without_policy, thread = checkpoints.noop_context_fn, threading.get_ident()

    def observed(
        fn: Any, preserve_rng_state: bool = True, context_fn: Any = without_policy, *rest: Any,
        **kwargs: Any,
    ) -> Iterator[None]:  # fmt: skip
        is_traced = threading.get_ident() == thread
        with region(context_fn is not without_policy) if is_traced else contextlib.nullcontext():
            yield from generator(fn, preserve_rng_state, context_fn, *rest, **kwargs)

    class PlainCall:
        @staticmethod
        def apply(fn: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            if threading.get_ident() != thread:
                return function.apply(fn, preserve_rng_state, *args)
            tensors = (each for each in args if isinstance(each, torch.Tensor))
            # Without an argument that requires a gradient, eager gives none to parameters either.
            has_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
            with region(False), torch.set_grad_enabled(has_gradient):
                return fn(*args)

    checkpoints._checkpoint_without_reentrant_generator = observed
    checkpoints.CheckpointFunction = PlainCall  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        checkpoints._checkpoint_without_reentrant_generator = generator
        checkpoints.CheckpointFunction = function
