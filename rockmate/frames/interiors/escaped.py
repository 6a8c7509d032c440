"""What a forward leaves outside of its results: tensors that others hold, and hooks on tensors.

A captured inside gives back its outputs and nothing else. A loss of a router that goes to a list of
the whole model, or a gradient that a hook notes, would be missing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rockmate.state.tensors import tensors_in

_HOOKED = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
)


class EscapedTensors(TorchFunctionMode):
    """Watches a run of a forward."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._has_hooks = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs, and notes which tensors are new."""
        kwargs = kwargs or {}
        self._has_hooks = self._has_hooks or func in _HOOKED
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor | tuple | list):
            given = set(map(id, tensors_in((args, kwargs))))
            new = [each for each in tensors_in(result) if id(each) not in given]
            self._made += map(weakref.ref, new)
        return result

    def found(self) -> str:
        """Describes tensors that outlive the call; empty if none do."""
        if self._has_hooks:
            return "it adds hooks to tensors"
        if any(each() is not None for each in self._made):
            return "tensors that it makes are kept outside of it, in a global list perhaps"
        return ""
