"""The leaf that makes a planned step's outputs require grad."""

from __future__ import annotations

import torch

from rockmate._torch.engine import will_execute


class Anchor:
    """An empty leaf and its accumulation node."""

    def __init__(self, device: torch.device) -> None:
        """On the device of the step."""
        self.leaf = torch.empty(0, device=device, requires_grad=True)
        self.node = torch.autograd.graph.get_gradient_edge(self.leaf).node

    def is_visited(self) -> bool:
        """Whether the running backward accumulates into every leaf, as `loss.backward()` does."""
        return will_execute(self.node)
