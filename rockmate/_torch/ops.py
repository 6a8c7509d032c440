"""Kinds of call targets in a captured graph."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload

__all__ = ["OpOverload", "is_op", "schema_of"]


def is_op(target: object) -> TypeGuard[OpOverload]:
    """Whether a call target is an op, of ATen or of another library. The class is private."""
    return isinstance(target, OpOverload)


def schema_of(op: Any) -> torch.FunctionSchema:
    """Names, types, defaults and aliasing of an op's arguments and results.

    `str(op)` has the name alone; nothing public has the schema.
    """
    return op._schema
