"""Models that have been through `torch.compile`: their training steps run the plain model.

Compiled code can be neither captured nor planned. `torch.compile(model)` is a module around the
model, `model.compile()` a mark on it, and a submodule may have been compiled by itself. A plan is
for the innermost model, and compiled submodules are traced, and run again, as if they were not
compiled. What the user holds stays as it is: its `state_dict` has the keys that it had, and in eval
mode it runs its compiled code.
"""

from __future__ import annotations

import inspect
import logging
import reprlib
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from rockmate._torch.dynamo import uncompiled_calls
from rockmate._torch.members import compiled_call, has_compiled, innermost, modules_within
from rockmate.errors import InvalidArgumentError

logger = logging.getLogger(__name__)
__all__ = ["has_compiled", "innermost", "plain_model", "require_module", "uncompiled"]
_NAMED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def require_module(model: Any) -> None:
    """Raises `InvalidArgumentError` for a model that is none, and says what to write instead."""
    if isinstance(model, nn.Module):
        return
    owner = getattr(model, "__self__", None)
    if isinstance(owner, nn.Module):
        advice = f'for a method give its module; methods=["{model.__name__}"] plans it.'
    elif inspect.isclass(model) and issubclass(model, nn.Module):
        advice = f"a class is given: make a model of it, {model.__name__}(...)."
    elif not callable(model):
        advice = "give one."
    else:
        advice = "a function is planned by "
        advice += "rockmate.plan_step(function, modules=[...], budget=0.7)."
    kind = f"{reprlib.repr(model)}, a {type(model).__name__}"
    raise InvalidArgumentError(f"the model is {kind}, and no nn.Module; {advice}")


def plain_model(model: nn.Module) -> nn.Module:
    """The model that was compiled; one line in the log says so. Another model as it is.

    Raises:
        InvalidArgumentError: it is no module, or it or one within is planned already.
    """
    require_module(model)
    plain = innermost(model)
    for module in modules_within(model):
        name = type(module).__name__
        if getattr(compiled_call(module), "is_plan", False):
            msg = f"the {name} is planned in place already. Call rockmate.release on it first."
            raise InvalidArgumentError(msg)
        if "_wrapped" in vars(module):
            kind = module.__class__.__name__
            msg = f"the {name} of a {kind} is planned already. Give what it wraps, its .original."
            raise InvalidArgumentError(msg)
    if has_compiled(model) and plain not in _NAMED:
        _NAMED.add(plain)
        logger.warning(
            "the %s has been through torch.compile: its training steps run uncompiled, since "
            "compiled code cannot be planned, and its eval calls run as compiled",
            type(plain).__name__,
        )
    return plain


def uncompiled(model: nn.Module) -> AbstractContextManager[None]:
    """Runs compiled modules of a model as if they were not."""
    return uncompiled_calls() if has_compiled(model) else nullcontext()
