"""What training takes of a device beside the activations, whatever the batch.

| part | bytes |
|---|---|
| device | context, libraries, other processes; see below |
| parameters | parameters and buffers, each once, as the allocator rounds |
| gradients | one element for each of a trainable parameter |
| state | of the optimizer, by the rules of `rockmate.memory_limit` |
| optimizer's step | temporary tensors, while no activation is live |

*Device* is measured where the model is: on CUDA what is in use less the model, on the CPU the
process's resident memory less the model, and a reserve for its growth. For a GPU that is elsewhere
1 GiB is assumed; it is not measured. A margin is added for what the allocator holds in reserve and
loses to fragmentation: 5 % of the memory of a GPU, 2 % on a CPU, assumed as well. `reserve` takes
the place of all that.

The temporary tensors of the optimizer's step follow PyTorch's implementations. On CUDA, Adam's
default runs over all parameters at once and holds the square roots of one state for each. A fused
step has none. On the CPU parameters are stepped one by one, with two tensors of the size of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from rockmate.budget import size_text
from rockmate.memory_limit import (
    MemoryLimit,
    Optimizer,
    kept_on_device,
    missing_state_bytes,
    present_bytes,
)

_DEVICE_BYTES = 1 << 30  # of a GPU that is elsewhere
_MARGINS = {"cuda": 0.05, "cpu": 0.02}  # of the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedMemory:
    """Bytes that every batch takes; see the module docstring.

    Attributes:
        device_bytes: what the device itself takes, the margin included.
        margin_bytes: what is left free for the allocator.
        parameter_bytes: parameters and buffers.
        gradient_bytes: gradients at rest.
        state_bytes: of the optimizer.
        step_bytes: temporary tensors of the optimizer's step.
        home_bytes: gradients and state that are at home, no part of the memory.
    """

    device_bytes: int
    margin_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    step_bytes: int
    home_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """What is held while activations are live."""
        return self.device_bytes + self.parameter_bytes + self.gradient_bytes + self.state_bytes

    def describe(self) -> str:
        """The parts, for an error."""
        return (
            f"parameters {size_text(self.parameter_bytes)}, "
            f"gradients {size_text(self.gradient_bytes)}, "
            f"optimizer state {size_text(self.state_bytes)}, "
            f"the device itself {size_text(self.device_bytes)}"
        )


def fixed_memory(
    model: nn.Module,
    limit: MemoryLimit,
    device: torch.device,
    *,
    rounded: Callable[[int], int],
    reserve_bytes: int | None = None,
    weights: str = "resident",
) -> FixedMemory:
    """What training a model takes of a device whatever the batch.

    Args:
        model: the model, on any device.
        limit: the memory and the optimizer.
        device: that it is trained on.
        rounded: the bytes of an allocation of so many bytes.
        reserve_bytes: what the device itself takes; None measures or assumes it.
        weights: which are at home, as for `Planner`: of "all", gradients and states, too.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    margin_bytes = 0
    if reserve_bytes is None:
        margin_bytes = int(_MARGINS.get(device.type, 0.0) * limit.limit_bytes)
        present = max(0, _device_bytes(model, device) - _held_state(limit.optimizer))
        reserve_bytes = present + margin_bytes
    sizes = [rounded(parameter.nbytes) for parameter in trained]
    kept = kept_on_device(trained, weights)
    gradient_bytes = sum(rounded(parameter.nbytes) for parameter in kept)
    state_bytes = missing_state_bytes(limit.optimizer, kept)
    all_bytes = sum(sizes) + missing_state_bytes(limit.optimizer, trained)
    return FixedMemory(
        device_bytes=reserve_bytes,
        margin_bytes=margin_bytes,
        parameter_bytes=sum(rounded(each.nbytes) for each in tensors.values()),
        gradient_bytes=3 * max(sizes, default=0) if limit.steps_in_backward else gradient_bytes,
        state_bytes=state_bytes + _held_state(limit.optimizer),
        step_bytes=0 if limit.steps_in_backward else _step_bytes(limit.optimizer, sizes, device),
        home_bytes=all_bytes - gradient_bytes - state_bytes,
    )


def _device_bytes(model: nn.Module, device: torch.device) -> int:
    """What is in use without the model; assumed for a GPU where the model is not."""
    here = [each for each in (*model.parameters(), *model.buffers()) if each.device == device]
    if device.type == "cuda" and not here:
        return _DEVICE_BYTES
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    tensors = {id(each): each.nbytes for each in (*here, *grads) if each.device == device}
    return max(0, present_bytes(device) - sum(tensors.values()))


def _held_state(optimizer: Optimizer) -> int:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _step_bytes(optimizer: Optimizer, sizes: list[int], device: torch.device) -> int:
    if not sizes:
        return 0
    name = optimizer_name(optimizer).lower()
    is_fused = isinstance(optimizer, torch.optim.Optimizer) and optimizer.defaults.get("fused")
    if is_fused or "fused" in name or "8bit" in name:
        return 0
    if device.type == "cuda" and "adafactor" not in name and not name.startswith("sgd"):
        return sum(sizes)
    return 2 * max(sizes)


def optimizer_name(optimizer: Optimizer) -> str:
    """The name that was given, or that of the class."""
    if isinstance(optimizer, str):
        return optimizer
    return (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__
