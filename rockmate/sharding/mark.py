"""The mark of modules that `fully_shard` has sharded, for those that need not know how."""

from __future__ import annotations

from typing import Any

from torch import nn

MARK = "_rockmate_sharded_model"


def sharded_model_of(module: nn.Module) -> Any:
    """The `ShardedModel` to which a module belongs; None if it is not sharded."""
    return getattr(type(module), MARK, None)


def held_gradients_of(model: nn.Module) -> Any:
    """The `HeldGradients` of a model that is sharded, in part or as a whole; else None."""
    found = next(filter(None, map(sharded_model_of, model.modules())), None)
    return None if found is None else found.held
