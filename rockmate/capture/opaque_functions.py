"""Autograd functions of other libraries that run as they are: kernels that no trace can follow.

Each is an opaque op, as an opaque module is (`opaque_module`): a stand-in module applies it. Those
that the user registers are opaque in every capture. Another one is found when a trace fails in it,
and is registered then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rockmate._torch.functions import applications_replaced
from rockmate.errors import InvalidArgumentError, UnsupportedModelError

logger = logging.getLogger(__name__)


class FunctionCaller(nn.Module):
    """Stands for a function where a submodule is needed."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        """Applies the function."""
        return self.function.apply(*args)


_callers: dict[type, FunctionCaller] = {}
_modules: set[type[nn.Module]] = set()


def register_opaque(kind: type) -> type:
    """Has a class run as it is in every plan: it is never traced.

    For kernels that a trace cannot follow, such as launches of a compiler of one's own, ctypes, or
    NumPy. The forward and the backward each become one op of the plan. What the forward saves is
    measured on the sample and counted. The plan keeps it or runs the forward a second time.

    The forward must not write into its inputs, and its outputs have the shapes that they have for
    the sample. To be called before planning. It may stand as a decorator.

    Args:
        kind: a subclass of `torch.autograd.Function`, or a class of modules.

    Returns:
        The same class.

    Raises:
        InvalidArgumentError: `kind` is neither.
    """
    if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
        _callers.setdefault(kind, FunctionCaller(kind))
    elif isinstance(kind, type) and issubclass(kind, nn.Module):
        _modules.add(kind)
    else:
        raise InvalidArgumentError(
            f"register_opaque was given {kind!r}; give a subclass of torch.autograd.Function or a "
            "class of modules. For a function without a class, register the module that calls it, "
            'or name that: untraced=["path"].'
        )
    return kind


def is_registered(module: nn.Module) -> bool:
    """Whether a module is of a class that is registered."""
    return isinstance(module, tuple(_modules)) if _modules else False


def calls_seen(
    see: Callable[[FunctionCaller, Callable[..., Any], tuple[Any, ...]], Any],
) -> contextlib.AbstractContextManager[None]:
    """Has `see` called for each call of a registered function, for its result."""

    def replacement(cls: type, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        caller = _callers.get(cls)
        return run(*args) if caller is None else see(caller, run, args)

    return applications_replaced(replacement) if _callers else contextlib.nullcontext()


@dataclass(slots=True)
class ForeignFunctions:
    """Functions of other libraries that a trace has met.

    Attributes:
        are_recorded: whether calls of registered functions are recorded before the trace. It takes
            a run of the model, so it is done for models that call some.
        met: all that were applied and are not registered.
        failed: those in which an error was raised.
        calls_registered: whether a registered one was applied.
    """

    are_recorded: bool
    met: dict[type, None] = field(default_factory=dict)
    failed: dict[type, None] = field(default_factory=dict)
    calls_registered: bool = False

    def traced(self) -> contextlib.AbstractContextManager[None]:
        """Applies stand-ins of registered functions, and takes note of others."""

        def replacement(cls: type, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            caller = _callers.get(cls)
            if caller is not None:
                self.calls_registered = True
                if not self.are_recorded:
                    raise UnsupportedModelError(f"calls of {cls.__qualname__} are not recorded yet")
                return caller(*args)
            self.met[cls] = None
            try:
                return run(*args)
            except Exception:
                self.failed[cls] = None
                raise

        return applications_replaced(replacement)

    def may_be_traced_again(self, error: Exception) -> bool:
        """After a trace that has failed: whether calls of functions are recorded from now on.

        Those that it has failed in are registered. An error of a backward is that of no function in
        particular, so all are registered then.
        """
        were_recorded, self.are_recorded = self.are_recorded, True
        if self.calls_registered and not were_recorded:
            return True
        found = [each for each in self.failed or self.met if each not in _callers]
        for function in found:
            logger.warning(
                "the autograd function %s.%s runs as one opaque op, since it cannot be traced: %s",
                function.__module__,
                function.__qualname__,
                str(error).partition("\n")[0][:200],
            )
            register_opaque(function)
        self.met.clear()  # what opaque ones read is read in each step
        return bool(found)


def refuse_written(name: str, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
    """The result of a call, which must not write into its tensors.

    Kernels of other compilers write without PyTorch's knowledge.

    Raises:
        UnsupportedModelError: it has written into one.
    """
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    before = [each.detach().clone() for each in tensors]
    result = run()
    for tensor, value in zip(tensors, before, strict=True):
        if not torch.equal(tensor.detach().nan_to_num(), value.nan_to_num()):
            raise UnsupportedModelError(
                f"the autograd function {name} writes into an input of shape "
                f"{tuple(tensor.shape)}, which the rest of the step would not see. Give it a copy "
                "(x.clone()), or leave a larger part of the model untraced."
            )
    return result
