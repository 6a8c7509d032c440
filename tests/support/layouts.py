"""Whether each op of a captured step lays its results out as the capture says."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from rockmate.ops.rng import is_random
from rockmate.planning.step import CapturedStep


def as_captured(node: fx.Node) -> Any:
    """Zeros in the layouts of a node's fake tensors."""
    return map_aggregate(node.meta["val"], of_layout)


def of_layout(fake: Any) -> Any:
    """Zeros in the layout of a fake tensor; other values as they are."""
    if not isinstance(fake, torch.Tensor):
        return fake
    extent = sum((size - 1) * step for size, step in zip(fake.shape, fake.stride(), strict=True))
    memory = torch.zeros(1 + max(extent, 0), dtype=fake.dtype)
    return memory.as_strided(fake.shape, fake.stride())


def steps_that_matter(tensor: torch.Tensor) -> list[int]:
    """Strides of dimensions of several elements."""
    return [
        step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ] * bool(tensor.numel())


def other_layouts(step: CapturedStep) -> list[str]:
    """Ops whose results have another layout than the capture says."""
    found = []
    for node in step.capture.joint.graph.nodes:
        if node.op != "call_function" or is_random(node.target) or "val" not in node.meta:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), as_captured)
        fake, result = node.meta["val"], node.target(*args, **kwargs)
        pairs = (
            zip(result, fake, strict=True) if isinstance(fake, tuple | list) else [(result, fake)]
        )
        found += [
            f"{node.name}: {mine.stride()}, captured {theirs.stride()}"
            for mine, theirs in pairs
            if isinstance(theirs, torch.Tensor)
            and steps_that_matter(mine) != steps_that_matter(theirs)
        ]
    return found
