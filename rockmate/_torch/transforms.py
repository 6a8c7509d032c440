"""Whether a call, or a backward, runs inside of a transform that has tensors of its own."""

from __future__ import annotations

import torch
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad


def active_transform() -> str | None:
    """Its name, such as "torch.func.vmap", the innermost first; None where there is none."""
    interpreter = peek_interpreter_stack()
    if interpreter is not None:
        return f"torch.func.{interpreter.key().name.lower()}"
    return "torch.autograd.forward_ad" if forward_ad._current_level >= 0 else None


def records_plainly() -> bool:
    """Whether autograd records calls, of tensors that have memory of their own."""
    return torch.is_grad_enabled() and active_transform() is None


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether it stands for several, as `torch.autograd.grad(is_grads_batched=True)` has it."""
    return is_legacy_batchedtensor(tensor)
