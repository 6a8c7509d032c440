"""Checks of a model before it is captured, and of its calls: whether planned steps can run it."""

from __future__ import annotations

import logging

from torch import nn

from rockmate._torch.transforms import active_transform
from rockmate.capture.model_signature import acting_hooks
from rockmate.capture.opaque_module import opaque_modules
from rockmate.costs.machine import Machine
from rockmate.errors import InvalidSampleError, UnsupportedModelError
from rockmate.runtime.ddp import refuse_sharded

logger = logging.getLogger(__name__)


def check_model(model: nn.Module, untraced: tuple[str, ...], machine: Machine | None) -> None:
    """Raises for a model that cannot be captured. Warns of hooks that will not run."""
    if not model.training:
        msg = "the model is in eval mode, where a plan is never used. Call model.train() first."
        raise InvalidSampleError(msg)
    refuse_sharded(model)
    opaque = list(opaque_modules(model, untraced))
    if machine is not None and opaque:
        msg = (
            f"the submodule {opaque[0]} is not traced, so it has to run to be measured, and "
            "nothing runs when planning for a machine by its description. Plan on the machine "
            "itself."
        )
        raise UnsupportedModelError(msg)
    with_hooks = [path for path, module in model.named_modules() if path and acting_hooks(module)]
    if with_hooks:
        logger.warning(
            "hooks of submodules run when the model is captured and not in planned training steps: "
            "%s",
            ", ".join(with_hooks),
        )


def refuse_transforms() -> None:
    """Raises for a call within a function transform, such as `torch.func.grad`."""
    transform = active_transform()
    if transform is not None:
        msg = (
            f"this training call runs inside of {transform}, which cannot see into a planned step. "
            "Transform module.original instead, the plain model with the same parameters."
        )
        raise UnsupportedModelError(msg)
