"""Calls from compiled code. To load this loads Dynamo, so it is imported where Dynamo runs."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable
def run_uncompiled(module: Any, args: Any, kwargs: Any) -> Any:
    """A call of a planned module as it is, whoever compiles its caller."""
    return module._run(args, kwargs)
