"""How large a step is, before it runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rockmate._torch.engine import is_profiling
from rockmate._torch.pytree import tree_leaves
from rockmate.frames.agreement import Agreement


class StepSize(NamedTuple):
    """The size of a step; with sharded parameters the largest of all ranks.

    Attributes:
        num_elements: of the inputs.
        held_bytes: by frames of earlier steps.
        is_profiled: whether a profiler runs, so that nothing can be recorded.
    """

    num_elements: int
    held_bytes: int
    is_profiled: bool

    @classmethod
    def of(cls, inputs: Any, held_bytes: int, agreement: Agreement | None) -> StepSize:
        """The size of a step. Collective with an agreement.

        Args:
            inputs: nested containers with tensors.
            held_bytes: see the attribute.
            agreement: with the ranks that take the same decisions.
        """
        tensors = (each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor))
        own = sum(each.numel() for each in tensors), held_bytes, int(is_profiling())
        num_elements, held_bytes, profiled = own if agreement is None else agreement.largest(own)
        return cls(num_elements, held_bytes, bool(profiled))
