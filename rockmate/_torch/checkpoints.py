"""Calls of `torch.utils.checkpoint` in a model's forward, observed while it is captured."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode

from rockmate._util import attributes_set


class _AsMode(TorchDispatchMode):
    """A context in the form of a dispatch mode, since a trace refuses all others.

    To enter it is to enter the context; the mode itself is never entered.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._context = context

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._context.__exit__(*error)


@contextlib.contextmanager
def checkpoints_observed(
    region: Callable[[bool, bool], AbstractContextManager[None]],
) -> Iterator[None]:
    """Runs each checkpointed call within a context, and a reentrant one as a plain call.

    Models call `torch.utils.checkpoint.checkpoint`, under any name, so only what that calls can be
    replaced. The reentrant kind runs its function without gradients and differentiates in a
    backward of its own, which a captured joint graph cannot have: its call would be captured
    without a backward.

    A call with contexts of its own runs in them, as in eager. What `debug` would record of the ops
    is not recorded.

    Args:
        region: makes the context of a call. It is told whether the call selects what it saves, and
            whether its recomputation restores the random state.
    """
    # Called by `checkpoint` itself; PyTorch 2.14 left the shorter name to other callers.
    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" if hasattr(checkpoints, f"{name}_impl") else ""
    generator, function = getattr(checkpoints, name), checkpoints.CheckpointFunction
    signature, thread = inspect.signature(generator), threading.get_ident()

    def observed(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() != thread:
            yield from generator(*args, **kwargs)
            return
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        options["context_fn"], is_selective = _traceable(options["context_fn"])
        is_restoring = options["preserve_rng_state"]
        with region(is_selective, is_restoring), checkpoints.set_checkpoint_debug_enabled(False):
            yield from generator(*call.args, **call.kwargs)

    class PlainCall:
        @staticmethod
        def apply(fn: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            if threading.get_ident() != thread:
                return function.apply(fn, preserve_rng_state, *args)
            tensors = (each for each in args if isinstance(each, torch.Tensor))
            # Without an argument that requires a gradient, eager gives none to parameters either.
            has_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
            with region(False, preserve_rng_state), torch.set_grad_enabled(has_gradient):
                return fn(*_each_with_one_gradient(args))

    with attributes_set(
        (checkpoints, name, observed), (checkpoints, "CheckpointFunction", PlainCall)
    ):
        yield


def _each_with_one_gradient(args: tuple[Any, ...]) -> list[Any]:
    """Arguments of a reentrant call whose gradients are added up before they are given outside.

    In eager the call's own backward adds them up. Views do so here: the last one is differentiated
    first, as eager gives the first gradient first.
    """
    views = [
        each.view_as(each) if isinstance(each, torch.Tensor) and each.requires_grad else each
        for each in reversed(args)
    ]
    return views[::-1]


def _traceable(context_fn: Any) -> tuple[Any, bool]:
    """What makes the contexts of a call in a form that can be traced, and whether they select."""
    if context_fn is checkpoints.noop_context_fn:
        return context_fn, False
    forward, recomputation = context_fn()
    contexts = tuple(
        context if isinstance(context, TorchDispatchMode) else _AsMode(context)
        for context in (forward, recomputation)
    )
    selecting, _ = checkpoints.create_selective_checkpoint_contexts([])
    return lambda: contexts, isinstance(forward, type(selecting))
