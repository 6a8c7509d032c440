"""A hook of all optimizers, as long as somebody lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook


def call_before_steps(function: Callable[[], object], *, owner: object) -> None:
    """Has a function called before each step of any optimizer.

    The hook stays: while it runs, all hooks are being gone through, and it must not remove itself.

    Args:
        function: does not hold the owner.
        owner: the hook goes with it.
    """

    def call(*_: Any) -> None:  # what it returns would be arguments
        function()

    hook = register_optimizer_step_pre_hook(call)
    weakref.finalize(owner, hook.remove)
