"""Backwards that ask for some gradients only: `torch.autograd.grad` and `backward(inputs=...)`.

A planned backward adds the gradients of parameters to `.grad` as it computes them. If the backward
asks for no parameter of the step, they are dropped instead, and the gradients of inputs are
returned as ever. Whether it asks for one can be told if the parameters are inputs of the planned
step: without hooks, outside a process group. Otherwise, and for parameters, it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rockmate._torch.engine import is_asked_for
from rockmate.errors import BackwardError
from rockmate.runtime.gradient_sink import GradientSink


class DroppingSink(GradientSink):
    """Drops the gradients of parameters."""

    def __init__(self) -> None:
        """Of no parameters."""
        super().__init__({}, fires_hooks=False)

    def _drop(self, *_: Any, **__: Any) -> None:
        """Computes nothing."""

    accumulate: Any = _drop
    accumulate_matmul: Any = _drop
    accumulate_embedding: Any = _drop
    fire_hooks: Any = _drop


def refuse_parameters(visited: Iterable[torch.Tensor], *, has_others: bool) -> None:
    """Raises `BackwardError` if the running backward may ask for parameters of the step.

    Args:
        visited: the parameters that are inputs of the step.
        has_others: whether the step has parameters that are not.
    """
    nodes = (torch.autograd.graph.get_gradient_edge(each).node for each in visited)
    if has_others or any(map(is_asked_for, nodes)):
        msg = (
            "torch.autograd.grad and backward(inputs=...) want gradients of parameters returned, "
            "or the model has hooks or is in a process group, and this module adds gradients to "
            '.grad as they are computed. Make it with gradients="returned".'
        )
        raise BackwardError(msg)
