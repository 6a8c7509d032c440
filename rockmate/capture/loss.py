"""Which of a model's outputs is its loss: the one definition, for planned and for eager steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def find_loss(output: Any, flat: list[torch.Tensor], *, has_labels: bool) -> int | None:
    """Index of the loss among the output's tensors; None if there is no loss.

    The loss is the entry `loss`, or the leading scalar of a tuple if the model was given `labels`.
    It has one element and requires a gradient.

    Args:
        output: What the model returned.
        flat: Its tensors.
        has_labels: Whether the model was given `labels`.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if (
        loss is None
        and has_labels
        and isinstance(output, tuple | list)
        and len(flat) > 1
        and flat[0] is output[0]
    ):
        loss = flat[0] if flat[0].ndim == 0 else None
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad or loss.numel() != 1:
        return None
    return next((index for index, tensor in enumerate(flat) if tensor is loss), None)
