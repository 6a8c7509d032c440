"""Small modules without a constructor of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def made_of(parts: Callable[..., dict[str, Any]]) -> Callable[[type], type]:
    """Gives instances of a class these attributes, in this order, after those of its base.

    What the class is called with goes to `parts`.
    """

    def with_parts(cls: Any) -> type:
        initialize = cls.__init__

        @functools.wraps(initialize)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            initialize(self)
            for name, part in parts(*args, **kwargs).items():
                setattr(self, name, part)

        cls.__init__ = __init__
        return cls

    return with_parts


def mlp(width: int, inner: int, *between: nn.Module) -> nn.Sequential:
    """A linear layer, what is between, or a GELU, and a linear layer back to `width`."""
    middle = between or (nn.GELU(),)
    return nn.Sequential(nn.Linear(width, inner), *middle, nn.Linear(inner, width))
