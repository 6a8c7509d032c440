"""Random ops: the state is kept at the first run and restored at every recomputation.

A random op of the joint graph draws from the default generator of its device. Recomputing it must give the first run's values and
must leave the generator where eager leaves it, so the recomputation runs between a restore of the kept state and a restore of the
present one. A state is 5,056 bytes on CPU and 16 on CUDA; it lives on the host.
"""

from __future__ import annotations

from typing import Any

import torch

from rockmate._torch.ops import is_op
from rockmate.ops.kernels import dropout_mask

CPU_STATE_BYTES = 5056


def is_random(target: Any) -> bool:
    """Whether a call of this target draws random numbers (an attention op bears the tag even without dropout)."""
    if target is dropout_mask or getattr(
        target, "draws", False
    ):  # an untraced submodule says so itself
        return True
    return is_op(target) and torch.Tag.nondeterministic_seeded in target.tags


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[
            device.index if device.index is not None else torch.cuda.current_device()
        ]
    return torch.default_generator


def keep_state(device: torch.device) -> torch.Tensor:
    """The present state of the device's default generator."""
    return _generator(device).get_state()


def exchange_state(device: torch.device, state: torch.Tensor) -> torch.Tensor:
    """Sets the device's default generator to `state` and returns the state that it was in."""
    generator = _generator(device)
    present = generator.get_state()
    generator.set_state(state)
    return present
