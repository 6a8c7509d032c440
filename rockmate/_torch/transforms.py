"""Whether a call runs inside of a function transform or of forward-mode differentiation."""

from __future__ import annotations

from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad


def active_transform() -> str | None:
    """Its name, such as "torch.func.vmap", the innermost first; None where there is none."""
    interpreter = peek_interpreter_stack()
    if interpreter is not None:
        return f"torch.func.{interpreter.key().name.lower()}"
    return "torch.autograd.forward_ad" if forward_ad._current_level >= 0 else None
