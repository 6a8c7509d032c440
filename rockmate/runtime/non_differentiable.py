"""Raises if a loss depends on an output that the plan treats as non-differentiable.

With `differentiable="loss"` the plan has a gradient for the model's own loss alone. In eager the
other outputs have gradients, too. A loss term that is computed of them outside the model, such as
distillation or an auxiliary loss, trains in eager. A planned step would silently leave it out.
"""

from __future__ import annotations

from typing import Any

import torch

from rockmate.errors import BackwardError

# Makes outputs require grad. Its own gradient stays None.
_LEAF = torch.empty(0, requires_grad=True)


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
                f"the loss uses an output of shape {tuple(tangents[0].shape)} beside the model's "
                "own loss, and the plan has no gradient for it. Make the module with "
                'differentiable="all", or detach that output.'
            )
            raise BackwardError(msg)
        return None, None


def forbid_gradient(output: torch.Tensor) -> torch.Tensor:
    """The output in the same memory, as a tensor whose backward raises for a nonzero gradient."""
    return NonDifferentiableOutput.apply(_LEAF, output)
