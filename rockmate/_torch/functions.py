"""Calls of autograd functions, seen or replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Replacement = Callable[[type, Callable[..., Any], tuple[Any, ...]], Any]
"""Takes the class of a function, what would run it, and its arguments; returns its result."""


@contextlib.contextmanager
def applications_replaced(replacement: Replacement) -> Iterator[None]:
    """Has `replacement` called for each `apply` of an autograd function.

    `Function.apply` ends in a call of its base class, which has no public name. It is replaced
    there, since code holds `apply` itself: `swiglu = SwiGLU.apply`.
    """
    base: Any = torch.autograd.function._SingleLevelFunction
    descriptor = torch._C._FunctionBase.__dict__["apply"]

    def apply(cls: type, *args: Any) -> Any:
        return replacement(cls, descriptor.__get__(None, cls), args)

    before = vars(base).get("apply")
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del base.apply
        else:
            base.apply = before
