"""Frames that drop nothing later: they run as in eager, or by a schedule, without hooks."""

from __future__ import annotations

from typing import Any

from rockmate._torch.engine import keeps_graph
from rockmate.frames.memory import Memory
from rockmate.frames.needs import FrameKey
from rockmate.frames.schedule_cost import ScheduleCost
from rockmate.state.tensors import tensors_in


class KeptFrame:
    """One call of a submodule, which holds what it saves until its backward has ended.

    It is held by a hook of the graph that the call makes. So it goes when the graph goes, if no
    backward runs before.

    Attributes:
        key: which call.
        order: position among all frames, by the beginning of their calls.
        step: the forward of the model that it belongs to.
        num_bytes: that it holds, as known from calls before.
        schedule: of a captured inside; None if it runs as in eager.
    """

    schedule: ScheduleCost | None = None

    def __init__(self, key: FrameKey, order: int, num_bytes: int, memory: Memory) -> None:
        """Counts nothing yet."""
        self.key, self.order, self._memory = key, order, memory
        self.step = memory.in_flight.present
        self._known_bytes, self.num_bytes = num_bytes, 0

    def end_forward(self, output: Any) -> None:
        """The forward has run: takes its place among what is held.

        Args:
            output: of the call.
        """
        nodes = {node for each in tensors_in(output) if (node := each.grad_fn) is not None}
        for node in nodes:
            node.register_prehook(self._begin_backward)
        if nodes:
            self.num_bytes = self._known_bytes
        self._memory.end_kept(self)

    def _begin_backward(self, _: Any) -> None:
        self._memory.begin_backward(self)
        if not keeps_graph():
            self._memory.end_backward_later(self)

    def release(self) -> None:
        """What it saved is free."""
        self._memory.kept_bytes -= self.num_bytes
        self.num_bytes = 0

    def __del__(self) -> None:
        """The graph is free."""
        self.release()


class PlannedFrame(KeptFrame):
    """One call of a submodule, which holds what its schedule says until its backward has ended."""

    def __init__(self, key: FrameKey, order: int, schedule: ScheduleCost, memory: Memory) -> None:
        """Counts nothing yet."""
        super().__init__(key, order, schedule.held_bytes, memory)
        self.schedule = schedule
