"""Random ops: their state is saved at the first run and restored at every recomputation.

A random op of the joint graph draws from the default generator of its device. A recomputation must
give the first run's values and must leave the generator as eager leaves it. So it runs between two
calls of `exchange_random_state`: one sets the saved state, the other sets the present state again.

A state lives on the host. It takes 5,056 bytes on CPU and 16 bytes on CUDA.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rockmate._torch.dispatch import is_op
from rockmate.ops.kernels import dropout_mask

# Size of a CPU generator's state.
CPU_STATE_BYTES = 5056
# These have the tag of random ops and draw nothing: they take the seed and the offset of the
# forward as arguments.
_SEEDED = {
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default,
}


def is_random(target: Any) -> bool:
    """Whether a call of this target may draw random numbers.

    Attention ops have the tag, also in calls without dropout. Opaque modules have `draws`.
    """
    if target is dropout_mask or getattr(target, "draws", False):
        return True
    has_tag = is_op(target) and torch.Tag.nondeterministic_seeded in target.tags
    return has_tag and target not in _SEEDED


def is_seed(node: fx.Node) -> bool:
    """Whether a value is the seed or the offset that a random op on a GPU returns.

    The kernel of the backward may read it on the host. Fake tensors do not tell where it is.
    """
    fake, producer = node.meta["val"], node.args[0] if node.args else None
    if node.target is not operator.getitem or not isinstance(fake, torch.Tensor):
        return False
    is_small = fake.is_cuda and not fake.is_floating_point() and fake.numel() <= 2
    return is_small and isinstance(producer, fx.Node) and is_random(producer.target)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def get_random_state(device: torch.device) -> torch.Tensor:
    """The state of the device's default generator."""
    return _generator(device).get_state()


def exchange_random_state(device: torch.device, state: torch.Tensor) -> torch.Tensor:
    """Sets the state of the device's default generator and returns the state before."""
    generator = _generator(device)
    present = generator.get_state()
    generator.set_state(state)
    return present
