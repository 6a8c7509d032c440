"""What training adds to a weight at home: its gradient, and the state of its optimizer.

They are tensors of the weight's device whose memory lies in the home, as the weight's own does. A
backward adds gradients up there, and an optimizer, whoever calls it and when, reads and writes
gradient, state and weight where they are: on a GPU its kernels do so by way of the link. So an
update needs no copy back, and has the bits of the resident model.

Memory of a gradient serves another one when the last tensor that shares it has gone, as any memory.
An optimizer makes its state on the device, from where it goes home at the end of the step.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from rockmate.offload.tier import Slab, Tier
from rockmate.schedule.move import SLOT_ALIGNMENT


class Ground:
    """Memory of a home, in pieces. It is set aside as it is needed, an eighth more each time."""

    def __init__(self, tier: Tier[Any], device: torch.device) -> None:
        self._tier, self._device = tier, device
        self._slabs: list[tuple[Slab, range]] = []  # with its addresses
        self._left_bytes = self._num_bytes = 0  # of the last slab, of all
        self._free: defaultdict[int, list[tuple[Slab, int]]] = defaultdict(list)  # by bytes

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor there, without values yet.

        Raises:
            OffloadError: the home has no more room.
        """
        size = -(-like.nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        slab, offset = self._free[size].pop() if self._free[size] else self._further(size)
        view = slab.view(offset, like.nbytes, self._device)
        give_back = self._free[size].append
        weakref.finalize(view.untyped_storage(), give_back, (slab, offset)).atexit = False
        return view.view(like.dtype).view(like.shape)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies there."""
        return any(tensor.data_ptr() in addresses for _, addresses in self._slabs)

    def _further(self, size: int) -> tuple[Slab, int]:
        if self._left_bytes < size:
            self._left_bytes = max(size, self._num_bytes // 8 // SLOT_ALIGNMENT * SLOT_ALIGNMENT)
            self._num_bytes += self._left_bytes
            slab = self._tier.borrow(self._left_bytes)
            begin = slab.view(0, self._left_bytes, self._device).data_ptr()
            self._slabs.append((slab, range(begin, begin + self._left_bytes)))
        slab, addresses = self._slabs[-1]
        self._left_bytes -= size
        return slab, len(addresses) - self._left_bytes - size


# By the identity of a parameter: the parameter, and where its gradient and state are.
_GROUND_OF: dict[int, tuple[weakref.ref[torch.Tensor], Ground]] = {}
_HOOKS: list[Any] = []


def keep_at(ground: Ground | None, parameter: torch.Tensor) -> None:
    """Has the gradient and state of a parameter there from now on; None has them on the device."""
    if ground_of(parameter) is ground:  # as before each step but the first
        return
    if ground is None:
        del _GROUND_OF[id(parameter)]
        return
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_send_state_home))
    key = id(parameter)
    own = weakref.ref(parameter, lambda _: _GROUND_OF.pop(key, None) and None)
    _GROUND_OF[key] = own, ground


def ground_of(parameter: torch.Tensor) -> Ground | None:
    """Where its gradient and state are at home; None if they are on the device."""
    found, ground = _GROUND_OF.get(id(parameter), (None, None))
    return ground if found is not None and found() is parameter else None


def gradient_at_home(parameter: torch.Tensor) -> torch.Tensor | None:
    """Memory at home for a gradient; None if it is to be on the device."""
    ground = ground_of(parameter) if _GROUND_OF else None
    return None if ground is None else ground.take(parameter)


def send_gradient_home(parameter: torch.Tensor) -> None:
    """Sends the gradient home that autograd has put into `.grad`, if it is to be there."""
    ground = ground_of(parameter) if _GROUND_OF else None
    if ground is not None and parameter.grad is not None:
        parameter.grad = _sent(parameter.grad, ground)


def _send_state_home(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """After each step of any optimizer, what it has made of late."""
    for parameter, state in optimizer.state.items():
        ground = ground_of(parameter) if isinstance(parameter, torch.Tensor) else None
        if ground is not None and isinstance(state, dict):
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.device == parameter.device:
                    value.data = _sent(value, ground)


def _sent(tensor: torch.Tensor, ground: Ground) -> torch.Tensor:
    """The tensor at home. One of a class of its own, or a number, stays."""
    is_plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    if not is_plain or tensor.numel() < 2 or not tensor.is_contiguous() or ground.has(tensor):
        return tensor.data
    return ground.take(tensor).copy_(tensor.detach())
