"""Calls of autograd functions, seen or replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import Function

from rockmate._torch.engine import active_transform
from rockmate._util import attributes_set

Replacement = Callable[[type, Callable[..., Any], tuple[Any, ...]], Any]
"""Takes the class of a function, what would run it, and its arguments; returns its result."""


@contextlib.contextmanager
def applications_replaced(replacement: Replacement) -> Iterator[None]:
    """Has `replacement` called for each application of an autograd function of another library.

    Code holds `apply` itself (`swiglu = SwiGLU.apply`), which is a compiled method from PyTorch
    2.14 on. So each class gets another forward and backward for the duration. What a replacement
    computes is differentiated within that backward, which must run within the context, too.

    Functions of PyTorch and of this package, and classes made meanwhile, run as they are.
    """
    with contextlib.ExitStack() as stack:
        for cls in _foreign_functions():
            stack.enter_context(_replaced(cls, replacement))
        yield


def _foreign_functions() -> list[type[Function]]:
    """All subclasses of `torch.autograd.Function` that other packages have made so far."""
    found: dict[type, None] = {}
    pending = list(Function.__subclasses__())
    while pending:
        cls = pending.pop()
        pending += [each for each in cls.__subclasses__() if each not in found]
        if cls.__module__.partition(".")[0] not in ("torch", "rockmate"):
            found[cls] = None
    return list(found)


@contextlib.contextmanager
def _replaced(cls: Any, replacement: Replacement) -> Iterator[None]:
    """Gives one class a forward that calls `replacement`, and the backward of what that computes.

    A forward that takes no context leaves the replaced call for `setup_context` to find, which
    PyTorch calls right after it.
    """
    forward, setup_context = cls.forward, cls.setup_context
    takes_context = setup_context is Function.setup_context
    backward_name = "backward" if cls.vjp is Function.vjp else "vjp"
    backward = getattr(cls, backward_name)
    calls: list[_NestedCall] = []

    def run_forward(*args: Any) -> Any:
        if active_transform() is not None:
            return forward(*args)
        tensors = args[1:] if takes_context else args
        call = _NestedCall(tensors)
        result = call.run(lambda run, leaves: replacement(cls, run, leaves), lambda: forward(*args))
        if call.is_replaced and takes_context:
            args[0].rockmate_call = call
        elif call.is_replaced:
            calls.append(call)
        return result

    def run_setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        if calls:
            ctx.rockmate_call = calls.pop()
        else:
            setup_context(ctx, inputs, output)

    def run_backward(ctx: Any, *gradients: Any) -> Any:
        call = getattr(ctx, "rockmate_call", None)
        return backward(ctx, *gradients) if call is None else call.backward(gradients)

    changed = {"forward": run_forward, backward_name: run_backward}
    changed |= {} if takes_context else {"setup_context": run_setup_context}
    with attributes_set(*((cls, name, staticmethod(each)) for name, each in changed.items())):
        yield


class _NestedCall:
    """An application that a replacement computes, with a graph of its own."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self._leaves = tuple(
            each.detach().requires_grad_(each.requires_grad) if _is_tensor(each) else each
            for each in args
        )
        self._outputs: tuple[Any, ...] = ()
        self.is_replaced = True

    def run(self, replacement: Callable[..., Any], forward: Callable[[], Any]) -> Any:
        """The result of the replacement, less its graph; that of `forward` if it has called it."""

        def as_it_is(*_: Any) -> Any:
            self.is_replaced = False
            with torch.no_grad():
                return forward()

        with torch.enable_grad():
            result = replacement(as_it_is, self._leaves)
        if not self.is_replaced:
            return result
        self._outputs = result if isinstance(result, tuple) else (result,)
        detached = tuple(each.detach() if _is_tensor(each) else each for each in self._outputs)
        return detached if isinstance(result, tuple) else detached[0]

    def backward(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """The gradient of each argument; None for those that have none."""
        given = gradients[0] if isinstance(gradients[0], list) else gradients  # boxed_grads_call
        pairs = [
            (output, gradient)
            for output, gradient in zip(self._outputs, given, strict=True)
            if _is_tensor(output) and output.requires_grad and gradient is not None
        ]
        leaves = [each for each in self._leaves if _is_tensor(each) and each.requires_grad]
        outputs, incoming = [list(each) for each in zip(*pairs, strict=True)] or [[], []]
        found = iter(torch.autograd.grad(outputs, leaves, incoming, allow_unused=True))
        return tuple(
            next(found) if _is_tensor(each) and each.requires_grad else None
            for each in self._leaves
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
