"""TODO: plan_cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import nn

from rockmate.capture.signature import (
    CallSignature,
    ModelSignature,
    ModelWatch,
)
from rockmate.runtime.autograd import Runner
from rockmate.runtime.planned_call import PlannedCall
from rockmate.step_family import StepFamily

logger = logging.getLogger("rockmate")

MAX_PLANS = 64  # of one module; a shape or a state that comes back finds its plan again


class RunnableCall:
    """A planned call, ready to run on its model, and the watch over what it was planned for."""

    def __init__(
        self, planned: PlannedCall, model: nn.Module, family: StepFamily, *, is_adapted: bool
    ) -> None:
        self.planned = planned
        self.family = family
        self.is_adapted = is_adapted
        self.runner = Runner(planned.program, model)
        self.watch = ModelWatch(model)

    def difference(self, model: nn.Module, *, replans: bool = True) -> str:
        """What has changed in the model since it was planned, in words; empty if nothing has.

        A tensor hook asks for another plan if there can be one. It does no harm but to memory, so else it is only warned of.
        """
        if not self.watch.has_changed():
            return ""
        now = ModelSignature.of(model)
        found = self.planned.state.difference(now)
        hooked = sorted(now.hooked - self.planned.state.hooked)
        if found or not hooked:
            return found
        if replans:
            return f"{hooked[0]} has a tensor hook, which must see its whole gradient"
        self.warn_of_hooks(model)
        self.watch = ModelWatch(model)
        return ""

    def warn_of_hooks(self, model: nn.Module) -> None:
        """Warns of parameters with a tensor hook that the plan does not count."""
        size = {
            name: 2 * parameter.nbytes
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        hooked = sorted(ModelSignature.of(model).hooked - self.planned.state.hooked)
        if hooked:
            largest = max(hooked, key=size.__getitem__)
            logger.warning(
                "the tensor hook on %s must see the whole gradient, which the plan does not count: up to %s bytes beyond the budget "
                "(%d parameters have such a hook). Register hooks before planning.",
                largest, f"{size[largest]:,}", len(hooked),
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """The first call with its keywords: a budget that is a share is one of its peak, or was made bytes when it came.

    Attributes:
        call: its signature.
        share_bytes: those bytes.
    """

    call: CallSignature
    share_bytes: int | None = None
