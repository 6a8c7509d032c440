"""The mark of modules that `fully_shard` has sharded, for those that need not know how."""

from __future__ import annotations

from typing import Any

from torch import nn

MARK = "_rockmate_sharded_model"


def sharded_model_of(module: nn.Module) -> Any:
    """The `ShardedModel` to which a module belongs; None if it is not sharded."""
    return getattr(type(module), MARK, None)
