"""What frames ask of insides that are captured. They know nothing of captures themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from rockmate.frames.call import Arguments, Call
from rockmate.frames.schedule_cost import GradientContext, ScheduleCost


class Interior(Protocol):
    """The inside of the calls of one submodule, for arguments of one signature.

    Attributes:
        is_confirmed: whether gradients have come, and lie in memory as those of its trial.
    """

    is_confirmed: bool

    @property
    def schedules(self) -> Sequence[ScheduleCost]:
        """How it can run, of rising seconds."""
        ...

    def expect(self, around: GradientContext) -> None:
        """Counts the bytes of its schedules where gradients go like this."""
        ...

    def confirm(self, place: int, gradient: torch.Tensor) -> bool:
        """Whether its trial had a gradient of this layout. If not, it is used no more.

        Args:
            place: among the tensors of the output.
            gradient: of that one, in eager.
        """
        ...

    def run(self, number: int, tensors: Sequence[torch.Tensor]) -> Any:
        """The result of a call.

        Args:
            number: of the schedule.
            tensors: of the arguments.
        """
        ...


class Interiors(Protocol):
    """The insides of all frames of a model."""

    def find(
        self, path: str, arguments: Arguments
    ) -> tuple[Interior, Sequence[torch.Tensor]] | None:
        """The inside of a call and the tensors of its arguments.

        None if it is not captured, or the submodule is not as it was.
        """
        ...

    def watch(self, module: nn.Module, arguments: Arguments) -> None:
        """A call begins whose inside is to be captured."""
        ...

    def learn(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Captures the inside of a call, if it can be.

        Args:
            call: which, with the state that it began in.
            module: the submodule.
            arguments: of the call.
        """
        ...
