"""Which of a model's outputs is its loss: the one definition, for planned and for eager steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def loss_of(output: Any, *, has_labels: bool) -> torch.Tensor | None:
    """The loss in a model's output; None if there is none.

    The loss is the entry `loss`, or the leading scalar of a tuple if the model was given `labels`.
    It has one element and requires a gradient.

    Args:
        output: what the model returned.
        has_labels: whether the model was given `labels`.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and has_labels and isinstance(output, tuple | list) and output:
        loss = output[0] if getattr(output[0], "ndim", None) == 0 else None
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad or loss.numel() != 1:
        return None
    return loss
