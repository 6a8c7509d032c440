"""A saved tensor of two values, zero and another one, held as booleans.

So are the masks of dropout on a CPU, which no op makes again. That a tensor has no third value is
seen on its bits whenever it is to be held so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rockmate._torch.storage import version_of
from rockmate.frames.saved import Saved
from rockmate.state.digest import fills_storage
from rockmate.state.tensors import storages_of

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A type for the bits of an element, by its bytes."""
_PIECE = 1 << 15
"""How many elements are compared at a time."""


@dataclass(frozen=True, slots=True)
class TwoValued:
    """Where such a tensor is not zero, and the bits of the other value.

    Attributes:
        is_set: booleans.
        storages: of these.
    """

    is_set: torch.Tensor
    storages: tuple[int, ...]
    _bits: int
    _dtype: torch.dtype

    @staticmethod
    def of(saved: Saved) -> TwoValued | None:
        """A saved tensor as it is now; None if it has other values, or was written since."""
        tensor = saved.tensor
        integers = _INTEGERS.get(tensor.itemsize)
        if integers is None or version_of(tensor) != saved.version or not fills_storage(tensor):
            return None
        bits = tensor.as_strided((tensor.numel(),), (1,)).view(integers)
        other = int(bits.amax())
        is_set = torch.empty(bits.shape, dtype=torch.bool, device=bits.device)
        # Memory is short when tensors are given up: this takes none beside the result.
        for own, result in zip(bits.split(_PIECE), is_set.split(_PIECE), strict=True):
            result.copy_(own)  # `ne`, `eq`, `equal` and `count_nonzero` take twice as long or more
            least, most = result.to(integers).mul_(other).sub_(own).aminmax()
            if least or most:
                return None
        is_set = is_set.as_strided(tensor.shape, tensor.stride())
        return TwoValued(is_set, storages_of(is_set), other, tensor.dtype)

    def unpacking_s(self, clock: Callable[[], float]) -> float:
        """Seconds that it takes to have the tensor again, as a piece of it shows: memory is short.

        Args:
            clock: seconds.
        """
        num_elements = self.is_set.numel()
        length = min(_PIECE, num_elements)
        piece = TwoValued(self.is_set.as_strided((length,), (1,)), (), self._bits, self._dtype)
        begin = clock()
        _ = piece.unpacked()
        return (clock() - begin) * num_elements / length

    def unpacked(self) -> Saved:
        """The tensor, with the same bits."""
        integers = _INTEGERS[self._dtype.itemsize]
        return Saved.of(self.is_set.to(integers).mul_(self._bits).view(self._dtype))
