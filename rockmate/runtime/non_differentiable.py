"""Outputs that the plan cuts from the backward: a loss that uses one is told, and does not train without that part.

With `differentiable="loss"` the loss alone has a gradient, where the model's output has one. In eager every other output has one, too, so
a term of them that is added outside the model (distillation, an auxiliary loss) would train there, and be left out here without a word.
"""

from __future__ import annotations

from typing import Any

import torch

from rockmate.errors import BackwardError

_LEAF = torch.empty(
    0, requires_grad=True
)  # makes the result require grad; nothing is ever added to its own


class NonDifferentiableOutput(torch.autograd.Function):
    """A tensor that requires grad, as in eager, and refuses a gradient that is not zero."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, output: torch.Tensor) -> torch.Tensor:  # noqa: D102
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[None, None]:  # noqa: D102
        if tangents[0] is not None and bool(tangents[0].any()):
            msg = (
                f"the loss uses an output of shape {tuple(tangents[0].shape)} beside the model's own loss, and the plan has no gradient "
                'for it. Make the module with differentiable="all", or detach that output.'
            )
            raise BackwardError(msg)
        return None, None


def forbid_gradient(output: torch.Tensor) -> torch.Tensor:
    """The output's values in the same memory, as a tensor through which no gradient passes unnoticed."""
    return NonDifferentiableOutput.apply(_LEAF, output)
