"""What depends on the number of a mask's true elements works with their indices in a trace.

So `x[mask]`, `nonzero` and `masked_select` have fixed shapes where that number is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_READS = (torch.Tensor.item, torch.Tensor.tolist)  # whose results may be deferred


class CountedMasks(TorchFunctionMode):
    """Has what depends on the number of a mask's true elements work with their indices.

    It asks a `ValueReader`, which may defer reads. It stands above autograd, so that backwards work
    with them, too.
    """

    def __init__(self, reader: Any) -> None:
        super().__init__()
        self._reader = reader

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            return self._reader.read(func, *args, **kwargs)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            tensor, index, *value = args
            return func(tensor, self._without_masks(index), *value, **kwargs)
        if func in (torch.masked_select, torch.Tensor.masked_select):
            return self._selected(func, *args, **kwargs)
        if func in (torch.nonzero, torch.Tensor.nonzero):
            return self._nonzero(func, *args, **kwargs)
        if func is torch.tensor and isinstance(args[0], list | tuple):
            return self._made_of_scalars(args[0], kwargs)
        return func(*args, **kwargs)

    def _made_of_scalars(self, data: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """`torch.tensor` of a list of tensors reads their memory, without an op."""
        dtypes = {item.dtype for item in data if isinstance(item, torch.Tensor)}
        if len(dtypes) == 1:
            kwargs = {"dtype": dtypes.pop(), **kwargs}
            data = [item.item() if isinstance(item, torch.Tensor) else item for item in data]
        return torch.tensor(data, **kwargs)

    def _without_masks(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        found = [self._reader.true_elements(part) for part in parts]
        if not any(found):
            return index
        pairs = zip(parts, found, strict=True)
        return tuple(chain.from_iterable(true or (part,) for part, true in pairs))

    def _selected(self, func: Any, input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if input.shape != mask.shape:
            return func(input, mask)
        true = self._reader.true_elements(mask)
        return func(input, mask) if true is None else input[true]

    def _nonzero(self, func: Any, input: torch.Tensor, *, as_tuple: bool = False) -> Any:
        true = self._reader.true_elements(input)
        if true is None:
            return func(input, as_tuple=as_tuple)
        return true if as_tuple else torch.stack(true, 1)
