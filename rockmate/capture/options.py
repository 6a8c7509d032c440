"""Options of a capture, and the values that options of a plan may have. Nothing here needs torch.

`PlanOptions` has all options of a plan and says what they mean.
"""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

from rockmate.errors import InvalidArgumentError, check_choice

Differentiable = Literal["loss", "all"]
Outputs = Literal["all", "loss"]
Gradients = Literal["accumulated", "returned"]
Numerics = Literal["any_order", "bitwise"]
Kernels = Literal["eager", "fused", "auto"]
ExistingCheckpoints = Literal["lift", "honour"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Options that `PlanOptions`, which explains them, and the options of a step share.

    Raises:
        InvalidArgumentError: an option has none of its values, or `in_flight` is no whole number
            from 1 on.
    """

    differentiable: Differentiable = "loss"
    outputs: Outputs = "all"
    gradients: Gradients = "accumulated"
    untraced: Sequence[str] = ()
    in_flight: int = 1

    def __post_init__(self) -> None:
        for name, values in choices_of(type(self)).items():
            check_choice(name, getattr(self, name), values)
        number = self.in_flight
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise InvalidArgumentError(
                f"in_flight is {number!r}; give the number of forwards before a backward, at "
                "least 1"
            )
        given = self.untraced.split(",") if isinstance(self.untraced, str) else self.untraced
        object.__setattr__(self, "untraced", tuple(name for name in given if name))


def choices_of(options: type) -> dict[str, tuple[str, ...]]:
    """The values of the options that have a few, by name."""
    known = ChainMap(*(vars(sys.modules[each.__module__]) for each in options.__mro__))
    types = {each.name: known.get(str(each.type)) for each in fields(options)}
    return {name: get_args(kind) for name, kind in types.items() if get_origin(kind) is Literal}
